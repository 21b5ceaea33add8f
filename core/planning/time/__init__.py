"""Time: of a step, of what surrounds the training, and the schedule that fits; corrected by measurements."""
