"""Configurations of other tools: DeepSpeed's and Accelerate's read as plans, plans written for five tools."""
