"""The log of a run: records of steps, lines for a person, and where records go."""
