"""Our side of Axolotl: plugin, patches, trainer classes. `import axolotl` in here is the real package."""
