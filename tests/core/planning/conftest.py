"""The training environment, as the recipes' tests find it."""

from tests.core.recipes.conftest import training_python

__all__ = ["training_python"]
