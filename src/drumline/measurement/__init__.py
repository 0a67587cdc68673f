"""Measurement of this machine: kernels, messages, synchronisation, host overhead; benchmarks; the doctor."""
