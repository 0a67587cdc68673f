"""Strategies of data parallelism: replicas, flat shards, full shards, distributed experts, threads."""
