"""Wikipedia's dumps to text: extract, clean, split."""
