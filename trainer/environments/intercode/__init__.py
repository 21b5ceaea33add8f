"""The evaluator's shell tasks: file systems, questions, commands that are run, rows and a rehearsal."""
