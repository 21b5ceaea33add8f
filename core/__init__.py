"""Code that daemon and trainer share: vocabulary, facts, profiles, the planner, recipes and run files.

Nothing here uses the network or a heavy import. Files are read and written by `config` (YAML), `data`
(rows, archives, pictures), `submission` (a model's folder) and `runs` (a run's files); `system` touches the
operating system, and its `wrapper` is the first process of a training.
"""
