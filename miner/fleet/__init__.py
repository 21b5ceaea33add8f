"""GPUs: inventory, health, measurements, and who holds which until when."""
