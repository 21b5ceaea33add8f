"""The field's training settings beside our own plans, and the laws that follow from them."""
