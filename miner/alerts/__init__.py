"""Rules on measurements, their alerts, and the actions that rules ask of trainings."""
