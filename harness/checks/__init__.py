"""Check kinds: one module each, with the claim it proves, what it asks a child to measure, and how it judges."""
