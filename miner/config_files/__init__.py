"""The operator's YAML files: shown, checked and saved; and what a change of them would do."""
