"""How far the draft may run ahead: gamma policies, their cost and acceptance models, and replay to compare them."""
