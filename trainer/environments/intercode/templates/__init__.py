"""Questions with the commands that answer them.

A slot such as `<dir>` or `<text2>` is filled from the file system that the task is about (`tasks`). The last
question of a template is kept for rehearsals. What is wrong or beside the point changes nothing.
"""

from __future__ import annotations

from trainer.environments.intercode.templates.changing import CHANGING, FOLDERS
from trainer.environments.intercode.templates.finding import FINDING, FINDING_BY_CONTENT
from trainer.environments.intercode.templates.plain import NO_FILES
from trainer.environments.intercode.templates.template import Template
from trainer.environments.intercode.templates.texts import TEXTS

__all__ = ["TEMPLATES", "Template"]

TEMPLATES: tuple[Template, ...] = (
    *FINDING,
    *FINDING_BY_CONTENT,
    *TEXTS,
    *FOLDERS,
    *CHANGING,
    *NO_FILES,
)
