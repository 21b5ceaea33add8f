"""Folders of models."""


def get_folder_paths(kind: str) -> list[str]:
    return []
