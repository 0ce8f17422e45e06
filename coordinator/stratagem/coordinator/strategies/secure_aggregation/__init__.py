"""The rules of secure rounds: what is exchanged before training, and when it is in vain."""
