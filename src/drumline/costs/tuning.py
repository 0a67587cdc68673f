"""Tuning constants of the operator cost model. Each states its unit, its source, and what moves when it changes.

Where no source is given, the value is an assumption.
"""

from __future__ import annotations

# -- error bounds of an estimate

MEASURED_ERROR = 0.25
"""Stated bound on the relative error of a step time at measured rates (prediction tables: docs/log/cpu.md,
docs/log/gpu.md). Shown with every estimate; no price depends on it."""

UNMEASURED_ERROR = 0.5
"""The same at the rates of a data sheet."""

# -- kernels

UNMEASURED_MATMUL_EFFICIENCY = 0.7
"""Share of peak that matmuls reach where no curve was measured. Compute times of catalogue clusters scale inversely
with it."""

FLOAT8_COPY_BYTES = 4.7
"""Bytes moved per value that enters or leaves an fp8 matmul of a linear layer: its scale is read off (2), it is scaled
(4) and cast (3), weights twice and transposed copies (2 each), averaged over the three matmuls of a layer. Counted from
runtime/numerics/float8.py; moves the price of `precision=fp8`."""

ROUNDING_BYTES = (44.0, 10.0)
"""Bytes moved by the update of `precision=bf16-pure` in addition to the optimizer's own in float32: per stored value (a
weight, a state) to round it, and per value (a gradient too) to widen it. Counted from
runtime/numerics/stochastic_rounding.py."""

FRESH_MEMORY_BYTES = 2.0**25
"""Bytes of an allocation above which glibc returns memory at once (its largest mmap threshold), so that a CPU faults in
every page of the next tensor again. Moves the price of large matmul outputs on CPUs."""

LOOP_CALLS = 4
"""Calls of one operator by a layer beyond which it is called in a loop, as of a GRU, whose later calls have no
overhead. Moves the overhead of recurrent layers on CPUs."""

# -- host of a GPU, in calls of one operator: by sixteen models of four libraries on a host whose GPU was almost idle
#    (benchmarks/gpu_entries.py, docs/log/gpu.md). They move steps that are bound by launches.

VIEW_CALLS = 0.1
"""Host time of a view."""

FUNCTION_CALLS = 0.075
"""Host time of a Python function."""

ATTENTION_CALLS = 1.0
"""Host time of attention, beyond that of another operator."""

CAST_CALLS = 1.1
"""Host time of a cast that autocast adds to a forward."""

BACKWARD_CAST_CALLS = 0.25
"""Host time of such a cast's backward, which involves no Python, in calls of an operator of the backward."""

BACKWARD_ATTENTION_CALLS = 2.0
"""Host time of the backward of attention, beyond that of another operator of the backward."""

PARAMETER_CALLS = 1.2
"""Host time of autograd to store the gradient of a parameter."""

HALF_CONVOLUTION_CALLS = 1.0
"""Host time of the backward of a convolution in 16 bits, which changes the layout of its tensors, beyond another's."""

RECURRENT_LAYERS = 4
"""Layers of the recurrent model whose host time `measure` takes (`DeviceSpec.host_overhead`, `recurrent`)."""

RECURRENT_CALL_LAYERS = 1.0
"""Host time of a time step of a recurrent forward beyond that of its layers, in layers: 22, 35 and 57 us for one, two
and four layers. A backward has none. Moves recurrent models with few layers."""

CALLS_PER_OP = 2.0
"""Host time of an operator, its views and functions included, where these were not counted."""

COMPILED_HOST = 1.15
"""A GPU host's time for a compiled model over that for the same model without compiling: its kernels are fewer, but
launched from Python. ResNet-50 with a batch of 32 on an H200 (docs/gpu.md). Moves `compile=true` alone."""

OPS_BEFORE_UPDATE = 12
"""Operators that the host launches from the norm of the gradients to the optimizer: the sums of the step, clipping, the
check for finite numbers. Counted in runtime/core/update.py. Moves steps that wait for their host."""

OPS_BETWEEN_STEPS = 12
"""Operators that a host could launch between reading a loss and launching the first kernel of the next step. Moves the
overhead of every step on a GPU."""

OPS_BETWEEN_CAPTURED_STEPS = 7
"""The same with `graph=true`: batch and seed are copied, and the graph is launched. Captured steps of a small MLP left
6.5 and 7.7 of them on two hosts. Moves `graph=true`."""

# -- sharded units of zero=3 on a GPU, counted from torch's fully_shard: estimates until several GPUs were measured

UNIT_CALLS = {"forward": 12.0, "backward": 24.0}
"""Operators that a host launches, hooks included, to gather a unit's parameters, copy them out and free them; in the
backward also to pack its gradients, scatter and unpack them. Moves zero=3 where steps wait for their host."""

UNIT_COPIES = {"forward": 4.0, "backward": 10.0}
"""Bytes that a device copies per parameter of a unit: gathered parameters are read and written in 16 bits; in the
backward again, and gradients are read in 16 bits and packed in 32. Moves zero=3 for models with few tokens."""

# -- optimizer

TENSORS_PER_KERNEL = 32
"""Tensors that one of torch's multi-tensor kernels works on; it depends on the number of operands. With fewer, a GPU
launches more kernels per update."""

FUSED_OPS = 3.0
"""Operators per tensor up to which an optimizer counts as fused: one kernel for its arithmetic, no temporaries. Moves
update time and peak memory on GPUs."""

# -- messages

STATISTICS_BYTES = 4096.0
"""Bytes of a norm's statistics, about. They are small: their start-up time is what counts."""

MOST_DRIFT = 0.3
"""How far replicas on CPUs drift apart between two messages, at most, as a share of their compute in between. Bounds
the price of BatchNorm statistics on CPUs."""

LONG_MESSAGE = 2.0**24
"""Bytes of a message whose start-up time is negligible."""

# -- workers and parameter servers (`sync`). All four are assumptions until a run of servers is measured.

REQUEST_SECONDS = 1e-4
"""Seconds in which a server answers a request for a task, in Python: a call of 8 bytes takes 92 to 107 us on two AMD
cores (benchmarks/server_or_ring.py). Moves steps of a few milliseconds."""

UPDATE_SECONDS = 1.5e-4
"""Seconds of an update of a few parameters by a server, in Python: 144 to 154 us there. Moves steps of a few
milliseconds."""

SOCKET_BANDWIDTH = 3e9
"""Bytes per second of one stream through a socket, where the links of a cluster are those of its GPUs and not of their
hosts: one copy into the kernel and one out of it. Moves the messages of workers with GPUs."""

SOCKET_ALPHA = 3e-5
"""Start-up seconds of such a message on one host."""

HOST_BANDWIDTH = 2e10
"""Bytes per second to the memory of a host that a cluster does not describe (`device.host`). Moves the updates and
copies of servers next to GPUs."""
