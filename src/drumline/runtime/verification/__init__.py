"""Verification that a plan computes what one device would."""
