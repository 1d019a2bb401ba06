"""Policies on prompts: live on a pair, or by replay of recorded steps; speed and fidelity of a pair."""
