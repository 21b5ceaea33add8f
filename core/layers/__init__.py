"""The YAML files that operators write: read with their lines, laid over one another, checked, followed."""
