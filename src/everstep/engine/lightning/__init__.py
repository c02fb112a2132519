"""A LightningModule as a program of ours: its layers, its step, its optimizer."""
