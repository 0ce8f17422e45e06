"""What members of a party make together: a state in parts, gradients added up in tree order."""
