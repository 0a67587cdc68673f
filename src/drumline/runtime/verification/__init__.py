"""The plan against one device: the reference, what both leave behind, and where they part."""
