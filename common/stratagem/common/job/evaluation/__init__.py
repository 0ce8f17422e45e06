"""The parts of the section `evaluation` that decide how a run goes on."""
