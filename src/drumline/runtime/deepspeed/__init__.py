"""Ways in for those who have a model, an optimizer and a loop already."""
