"""DeepSpeed's interface: `initialize(model=, config=)`, and an engine with forward, backward and step calls."""
