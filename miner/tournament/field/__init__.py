"""What the field trained with, beside our own plans, and the laws that follow."""
