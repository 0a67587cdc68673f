"""Running a job under a plan, on torch's own engines."""
