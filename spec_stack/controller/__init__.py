"""How far the draft may run ahead: the policies, one per file, and what they learn of costs and acceptance."""
