"""The YAML files that operators write: parsed with their lines, layered, validated, reloaded, documented."""
