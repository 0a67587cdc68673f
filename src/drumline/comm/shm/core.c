/* Collectives and byte rings in shared memory of the processes of one host. Compiled at first use by native.py.

   Letters: p ranks, r this rank, s another rank, n a step. A large buffer is moved in steps; step n uses slot n % SLOTS
   of every rank's staging memory. Small slots stay in cache, so main memory is touched only in the caller's buffer.
   Steps are numbered across all collectives of a group, and counters only grow, so nothing is ever reset.

   Every counter has one writer. `enter`: calls begun. `in`: steps whose input is in this rank's slot. `out`: steps
   whose reduced share is in it. `done`: steps that this rank has finished reading, so their slots are free. When all
   ranks have entered a call all slots are free, because all have left the previous one. */

#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LINE 64
#define SLOTS 4
#define OK 0
#define STOPPED 1   /* by the callback: a peer died, or a timeout */
#define MISMATCH 2  /* the ranks made different calls */

typedef struct {
    _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
    char pad[LINE - 8];
} Counter;

typedef struct {
    uint64_t signature;
    uint64_t site;
    uint64_t steps;
} Call;

typedef struct {
    Counter enter, in, out, done, bell;
    Call call[2];
    char pad[2 * LINE - 2 * sizeof(Call)];
} Control;

typedef struct {
    _Atomic uint64_t head; /* bytes ever written */
    char pad0[LINE - 8];
    _Atomic uint64_t tail; /* bytes ever read */
    _Atomic uint32_t full; /* the writer waits for room */
    char pad1[LINE - 12];
} Ring;

/* Called during a long wait: (rank waited for, which counter) -> nonzero to stop waiting. */
typedef int (*Slow)(int rank, int what);

typedef struct {
    char *base;       /* address of the shared memory */
    int32_t p, r;
    uint64_t small;   /* bytes of a rank's mailbox for short buffers; it has two */
    uint64_t slot;    /* bytes of one staging slot */
    uint64_t ring;    /* bytes of one ring, a power of two */
    uint64_t control_at, small_at, in_at, out_at, ring_at; /* offsets in the shared memory */
    uint32_t tick;    /* calls begun */
    uint32_t step;    /* steps of all finished calls */
    uint32_t spin_ns, yield_ns; /* how long a wait spins, and yields, before it sleeps */
    uint32_t slice_ms;
    uint32_t crossed; /* whether the sites of the last call differ between ranks */
    Slow slow;
} Group;

static inline Control *control(Group *g, int s) { return (Control *)(g->base + g->control_at) + s; }
static inline char *mailbox(Group *g, int s, uint32_t tick) {
    return g->base + g->small_at + ((uint64_t)s * 2 + (tick & 1)) * g->small;
}
static inline char *in_slot(Group *g, int s, uint32_t n) {
    return g->base + g->in_at + ((uint64_t)s * SLOTS + n % SLOTS) * g->slot;
}
static inline char *out_slot(Group *g, int s, uint32_t n) {
    return g->base + g->out_at + ((uint64_t)s * SLOTS + n % SLOTS) * g->slot;
}

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int reached(Counter *c, uint32_t target) {
    return (int32_t)(atomic_load_explicit(&c->value, memory_order_acquire) - target) >= 0;
}

static void raise_to(Counter *c, uint32_t value) {
    atomic_store_explicit(&c->value, value, memory_order_release);
    /* A sleeper counts itself before it reads the value; we write the value before we read the count. */
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&c->sleepers, memory_order_relaxed))
        syscall(SYS_futex, &c->value, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
}

/* Sleep until the value is no longer `seen`, at most `ms`. */
static void sleep_on(Counter *c, uint32_t seen, uint32_t ms) {
    struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000};
    atomic_fetch_add(&c->sleepers, 1);
    if (atomic_load(&c->value) == seen) syscall(SYS_futex, &c->value, FUTEX_WAIT, seen, &t, NULL, 0);
    atomic_fetch_sub(&c->sleepers, 1);
}

static inline uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Spin, then yield, then let the caller sleep: short waits are fast and long ones cost nothing. */
#define SPIN(ready) do { \
        for (int i_ = 0; i_ < 64; i_++) { if (ready) return OK; relax(); } \
        uint64_t begin_ = now(), spent_ = 0; \
        while (spent_ < g->spin_ns) { \
            for (int i_ = 0; i_ < 32; i_++) { if (ready) return OK; relax(); } \
            spent_ = now() - begin_; \
        } \
        while (spent_ < g->yield_ns) { \
            for (int i_ = 0; i_ < 4; i_++) { if (ready) return OK; sched_yield(); } \
            spent_ = now() - begin_; \
        } \
    } while (0)

static int await(Group *g, Counter *c, uint32_t target, int s, int what) {
    SPIN(reached(c, target));
    for (;;) {
        uint32_t seen = atomic_load_explicit(&c->value, memory_order_acquire);
        if ((int32_t)(seen - target) >= 0) return OK;
        uint64_t begin = now();
        sleep_on(c, seen, g->slice_ms);
        uint64_t ms = (now() - begin) / 1000000;
        if (ms * 2 >= g->slice_ms && !reached(c, target) && g->slow(s, what)) return STOPPED;
    }
}

static int await_all(Group *g, size_t offset, uint32_t target, int what) {
    for (int k = 1; k < g->p; k++) {
        int s = (g->r + k) % g->p;
        int code = await(g, (Counter *)((char *)control(g, s) + offset), target, s, what);
        if (code) return code;
    }
    return OK;
}

#define ALL(field, target, what) await_all(g, offsetof(Control, field), (target), (what))
#define TRY(call) do { int code_ = (call); if (code_) return code_; } while (0)

/* Begin a call: publish its hashes and number of steps, and read those of all others. */
static int enter(Group *g, uint64_t signature, uint64_t site, uint32_t steps, uint32_t *most) {
    uint32_t t = ++g->tick;
    Call *mine = &control(g, g->r)->call[t & 1];
    mine->signature = signature;
    mine->site = site;
    mine->steps = steps;
    raise_to(&control(g, g->r)->enter, t);
    TRY(ALL(enter, t, 0));
    int wrong = 0;
    uint32_t k = steps;
    g->crossed = 0;
    for (int s = 0; s < g->p; s++) {
        Call *c = &control(g, s)->call[t & 1];
        if (c->signature != signature) wrong = 1;
        if (c->site != site) g->crossed = 1;
        if (c->steps > k) k = (uint32_t)c->steps;
    }
    if (most) *most = k;
    return wrong ? MISMATCH : OK;
}

/* ------------------------------------------------------------------------------------------ reductions */

enum { F32, F64, F16, BF16, I8, U8, I16, I32, I64, BOOL, C64, C128, U16, U32, U64 };
enum { SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR, AVG };

#define ADD(a, b) ((a) + (b))
#define MUL(a, b) ((a) * (b))
#define LOW(a, b) ((a) != (a) || (a) < (b) ? (a) : (b))
#define HIGH(a, b) ((a) != (a) || (a) > (b) ? (a) : (b))
#define AND(a, b) ((a) & (b))
#define OR(a, b) ((a) | (b))
#define XOR(a, b) ((a) ^ (b))
#define LOGICAL_OR(a, b) ((a) || (b))
#define LOGICAL_AND(a, b) ((a) && (b))

/* dst = a op b, element by element; dst may be a. */
#define LOOP(T, F) do { \
        T *d_ = dst; const T *a_ = a, *b_ = b; \
        _Pragma("GCC ivdep") \
        for (uint64_t i = 0; i < count; i++) d_[i] = (T)F(a_[i], b_[i]); \
        return; \
    } while (0)
#define NUMBERS(T) \
    switch (op) { \
        case SUM: case AVG: LOOP(T, ADD); \
        case PRODUCT: LOOP(T, MUL); \
        case MIN: LOOP(T, LOW); \
        case MAX: LOOP(T, HIGH); \
    }
#define INTEGERS(T) \
    NUMBERS(T) \
    switch (op) { \
        case BAND: LOOP(T, AND); \
        case BOR: LOOP(T, OR); \
        case BXOR: LOOP(T, XOR); \
    }

static void reduce_pair(void *dst, const void *a, const void *b, uint64_t count, int dtype, int op) {
    switch (dtype) {
        case F32: NUMBERS(float) return;
        case F64: NUMBERS(double) return;
        case I8: INTEGERS(int8_t) return;
        case U8: INTEGERS(uint8_t) return;
        case I16: INTEGERS(int16_t) return;
        case U16: INTEGERS(uint16_t) return;
        case I32: INTEGERS(int32_t) return;
        case U32: INTEGERS(uint32_t) return;
        case I64: INTEGERS(int64_t) return;
        case U64: INTEGERS(uint64_t) return;
        case BOOL:
            switch (op) {
                case SUM: case MAX: case BOR: LOOP(uint8_t, LOGICAL_OR);
                case PRODUCT: case MIN: case BAND: LOOP(uint8_t, LOGICAL_AND);
                case BXOR: LOOP(uint8_t, XOR);
            }
            return;
        case C64: {
            float _Complex *d = dst; const float _Complex *x = a, *y = b;
            if (op == PRODUCT) for (uint64_t i = 0; i < count; i++) d[i] = x[i] * y[i];
            else for (uint64_t i = 0; i < count; i++) d[i] = x[i] + y[i];
            return;
        }
        case C128: {
            double _Complex *d = dst; const double _Complex *x = a, *y = b;
            if (op == PRODUCT) for (uint64_t i = 0; i < count; i++) d[i] = x[i] * y[i];
            else for (uint64_t i = 0; i < count; i++) d[i] = x[i] + y[i];
            return;
        }
    }
}

/* Half types are reduced in float and rounded once. */
static inline float from_bf16(uint16_t h) { uint32_t u = (uint32_t)h << 16; float f; memcpy(&f, &u, 4); return f; }
static inline uint16_t to_bf16(float f) {
    uint32_t u; memcpy(&u, &f, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
#ifdef __FLT16_MAX__
static inline float from_f16(uint16_t h) { _Float16 x; memcpy(&x, &h, 2); return (float)x; }
static inline uint16_t to_f16(float f) { _Float16 x = (_Float16)f; uint16_t h; memcpy(&h, &x, 2); return h; }
#else
static float from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023, u;
    if (e == 31) u = sign | 0x7f800000 | m << 13;
    else if (e) u = sign | (e + 112) << 23 | m << 13;
    else { float f = (float)m * 5.9604644775390625e-08f; return sign ? -f : f; }
    float f; memcpy(&f, &u, 4); return f;
}
static uint16_t to_f16(float f) {
    uint32_t u; memcpy(&u, &f, 4);
    uint32_t sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (a >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (a < 0x38800000) {
        float g; memcpy(&g, &a, 4); g = g * 16777216.0f; uint32_t m = (uint32_t)g; float rest = g - (float)m;
        if (rest > 0.5f || (rest == 0.5f && (m & 1))) m++;
        return (uint16_t)(sign | m);
    }
    a += 0xfff + ((a >> 13) & 1);
    return (uint16_t)(sign | ((a >> 13) - (112 << 10)));
}
#endif

#define TILE 1024
#define HALF(FROM, TO) do { \
        float acc[TILE], other[TILE]; \
        for (uint64_t at = 0; at < count; at += TILE) { \
            uint64_t n = count - at < TILE ? count - at : TILE; \
            const uint16_t *x = (const uint16_t *)from[0] + at; \
            for (uint64_t i = 0; i < n; i++) acc[i] = FROM(x[i]); \
            for (int s = 1; s < p; s++) { \
                x = (const uint16_t *)from[s] + at; \
                for (uint64_t i = 0; i < n; i++) other[i] = FROM(x[i]); \
                reduce_pair(acc, acc, other, n, F32, op); \
            } \
            if (op == AVG) for (uint64_t i = 0; i < n; i++) acc[i] /= (float)p; \
            uint16_t *d = (uint16_t *)dst + at; \
            for (uint64_t i = 0; i < n; i++) d[i] = TO(acc[i]); \
        } \
    } while (0)

static const uint64_t item[] = {4, 8, 2, 2, 1, 1, 2, 4, 8, 1, 8, 16, 2, 4, 8};

/* dst = from[0] op from[1] op ... in rank order, so that every rank computes the same bits. */
static void reduce_all(void *dst, const void **from, int p, uint64_t count, int dtype, int op) {
    if (dtype == BF16) { HALF(from_bf16, to_bf16); return; }
    if (dtype == F16) { HALF(from_f16, to_f16); return; }
    if (p == 1) { if (dst != from[0]) memcpy(dst, from[0], count * item[dtype]); return; }
    /* dst may be one of the sources: if it is a late one, each tile is computed in acc, because it is still needed. */
    const uint64_t size = item[dtype], tile = 8192 / size;
    char acc[8192] __attribute__((aligned(64)));
    int direct = 1;
    for (int s = 2; s < p; s++) if (from[s] == dst) direct = 0;
    for (uint64_t at = 0; at < count; at += tile) {
        uint64_t n = count - at < tile ? count - at : tile;
        char *d = (char *)dst + at * size, *to = direct ? d : acc;
        reduce_pair(to, (const char *)from[0] + at * size, (const char *)from[1] + at * size, n, dtype, op);
        for (int s = 2; s < p; s++) reduce_pair(to, to, (const char *)from[s] + at * size, n, dtype, op);
        if (op == AVG) {
            if (dtype == F32) for (uint64_t i = 0; i < n; i++) ((float *)to)[i] /= (float)p;
            else if (dtype == F64) for (uint64_t i = 0; i < n; i++) ((double *)to)[i] /= (double)p;
            else if (dtype == C64) for (uint64_t i = 0; i < n; i++) ((float _Complex *)to)[i] /= (float)p;
            else if (dtype == C128) for (uint64_t i = 0; i < n; i++) ((double _Complex *)to)[i] /= (double)p;
        }
        if (!direct) memcpy(d, to, n * size);
    }
}

/* ------------------------------------------------------------------------------------------ collectives */

static inline uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t ceil_div(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

/* The range of share s of block n, in elements: all blocks but the last are equal, and so are the shares of a block. */
typedef struct { uint64_t block, share, count; int p; } Blocks;
static inline void part(const Blocks *c, uint64_t n, int s, uint64_t *at, uint64_t *len) {
    uint64_t start = n * c->block, stop = min_u64(start + c->block, c->count), share = ceil_div(stop - start, c->p);
    *at = min_u64(start + share * s, stop);
    *len = min_u64(*at + share, stop) - *at;
}

/* Two ranks: both publish everything and both reduce it. A rank writes its next block into the memory that it has just
   read, so the lines are already in its cache. With separate slots per rank, each line crossed between the caches once
   more, and the call took half as long again (docs/bench.md). No rank waits for room either: the reader of a slot may
   write to it. */
#define AHEAD 2     /* blocks that are published before the first is read */
#define TOUCH 2048  /* bytes read and rewritten at a time: they are still in L1 */

static inline char *swap_slot(Group *g, int s, uint32_t n) { return in_slot(g, (s + n / AHEAD) % 2, n % AHEAD); }

/* Add `place` to x and store `next` in it, in one pass: each line of the other's memory is touched once. Only for sums
   of floats, where the order of two operands does not matter; returns whether it was done. */
#define ADD_AND_REPLACE(T) do { \
        T *x_ = x, *p_ = place; const T *n_ = next; \
        _Pragma("GCC ivdep") \
        for (uint64_t i = 0; i < count; i++) { T other_ = p_[i]; p_[i] = n_[i]; x_[i] += other_; } \
        return 1; \
    } while (0)
static inline int add_and_replace(void *x, void *place, const void *next, uint64_t count, int dtype) {
    if (dtype == F32) ADD_AND_REPLACE(float);
    if (dtype == F64) ADD_AND_REPLACE(double);
    return 0;
}

static int swap(Group *g, char *x, uint64_t count, uint64_t size, int dtype, int op, uint64_t signature, uint64_t site) {
    const int r = g->r;
    const uint64_t each = g->slot / size, tile = TOUCH / size;
    Control *mine = control(g, r), *peer = control(g, 1 - r);
    uint32_t steps, base = g->step;
    const void *from[2];
    TRY(enter(g, signature, site, (uint32_t)ceil_div(count, each), &steps));
    for (uint32_t w = 0; w < AHEAD && w < steps; w++) {
        memcpy(swap_slot(g, r, base + w), x + w * each * size, min_u64(each, count - w * each) * size);
        raise_to(&mine->in, base + w + 1);
    }
    for (uint32_t n = 0; n < steps; n++) {
        const uint64_t start = n * each, stop = min_u64(start + each, count);
        char *slot = swap_slot(g, 1 - r, base + n);
        TRY(await(g, &peer->in, base + n + 1, 1 - r, 2));
        for (uint64_t at = start; at < stop; at += tile) {
            const uint64_t next = at + AHEAD * each;
            char *place = slot + (at - start) * size;
            if (op == SUM && next + tile <= count && add_and_replace(x + at * size, place, x + next * size, tile, dtype))
                continue;
            from[r] = x + at * size;
            from[1 - r] = place;
            reduce_all(x + at * size, from, 2, min_u64(tile, stop - at), dtype, op);
            if (next < count) memcpy(place, x + next * size, min_u64(tile, count - next) * size);
        }
        if (n + AHEAD < steps) raise_to(&mine->in, base + n + AHEAD + 1);
    }
    raise_to(&mine->done, base + steps);
    g->step = base + steps;
    return OK;
}

/* Every rank (root < 0), or the root, ends with the reduction. In each step a rank publishes the shares of others,
   reduces its own share over all ranks, publishes the result, and reads the others' results of the previous step. */
int dl_all_reduce(Group *g, void *data, uint64_t count, uint64_t size, int dtype, int op, int root, uint64_t signature,
                  uint64_t site) {
    const int p = g->p, r = g->r;
    char *x = data;
    const void *from[p];
    if (count * size <= g->small) {
        memcpy(mailbox(g, r, g->tick + 1), x, count * size);
        TRY(enter(g, signature, site, 0, NULL));
        if (root >= 0 && root != r) return OK;
        for (int s = 0; s < p; s++) from[s] = mailbox(g, s, g->tick);
        if (p > 1) reduce_all(x, from, p, count, dtype, op);
        return OK;
    }
    if (p == 2 && root < 0) return swap(g, x, count, size, dtype, op, signature, site);
    const uint64_t most = g->slot / size / p * p; /* elements of a block: a slot has one share per rank */
    const uint64_t nblocks = ceil_div(count, most);
    const Blocks blocks = {ceil_div(ceil_div(count, nblocks), p) * p, 0, count, p};
    const uint64_t room = g->slot / size / p * size;
    uint32_t steps, base = g->step;
    TRY(enter(g, signature, site, (uint32_t)ceil_div(count, blocks.block), &steps));
    uint64_t at, len;
    for (uint32_t n = 0; n < steps + 1; n++) {
        /* the first step publishes two blocks, so that ranks do not wait for the slowest at each step */
        for (uint32_t w = n == 0 ? 0 : n + 1; w < n + 2 && w < steps; w++) {
            TRY(ALL(done, base + w + 1 - SLOTS, 1));
            for (int k = 1; k < p; k++) {
                int s = (r + k) % p;
                part(&blocks, w, s, &at, &len);
                memcpy(in_slot(g, r, base + w) + room * s, x + at * size, len * size);
            }
            raise_to(&control(g, r)->in, base + w + 1);
        }
        if (n < steps) {
            TRY(ALL(in, base + n + 1, 2));
            part(&blocks, n, r, &at, &len);
            for (int s = 0; s < p; s++) from[s] = s == r ? x + at * size : in_slot(g, s, base + n) + room * r;
            if (root < 0 || root != r) {
                char *out = out_slot(g, r, base + n);
                reduce_all(out, from, p, len, dtype, op);
                if (root < 0) memcpy(x + at * size, out, len * size);
            } else {
                reduce_all(x + at * size, from, p, len, dtype, op);
            }
            raise_to(&control(g, r)->out, base + n + 1);
        }
        if (n > 0) {
            if (root < 0 || root == r) {
                for (int k = 1; k < p; k++) {
                    int s = (r + k) % p;
                    TRY(await(g, &control(g, s)->out, base + n, s, 3));
                    part(&blocks, n - 1, s, &at, &len);
                    memcpy(x + at * size, out_slot(g, s, base + n - 1), len * size);
                }
            }
            raise_to(&control(g, r)->done, base + n);
        }
    }
    g->step = base + steps;
    return OK;
}

/* Rank r ends with share r of the reduction: `blocks[s]` is this rank's operand for s, each of `count` elements. */
int dl_reduce_scatter(Group *g, const void **blocks, void *out, uint64_t count, uint64_t size, int dtype, int op,
                      uint64_t signature, uint64_t site) {
    const int p = g->p, r = g->r;
    const void *from[p];
    const uint64_t room = g->slot / size / p * size, each = room / size;
    uint32_t steps, base = g->step;
    TRY(enter(g, signature, site, (uint32_t)ceil_div(count, each), &steps));
    for (uint32_t n = 0; n < steps; n++) {
        for (uint32_t w = n == 0 ? 0 : n + 1; w < n + 2 && w < steps; w++) {
            TRY(ALL(done, base + w + 1 - SLOTS, 1));
            uint64_t at = w * each, len = min_u64(each, count - at);
            for (int k = 1; k < p; k++) {
                int s = (r + k) % p;
                memcpy(in_slot(g, r, base + w) + room * s, (const char *)blocks[s] + at * size, len * size);
            }
            raise_to(&control(g, r)->in, base + w + 1);
        }
        TRY(ALL(in, base + n + 1, 2));
        uint64_t at = n * each, len = min_u64(each, count - at);
        for (int s = 0; s < p; s++)
            from[s] = s == r ? (const char *)blocks[r] + at * size : in_slot(g, s, base + n) + room * r;
        reduce_all((char *)out + at * size, from, p, len, dtype, op);
        raise_to(&control(g, r)->done, base + n + 1);
    }
    g->step = base + steps;
    return OK;
}

/* Publish `mine` (`bytes[r]` bytes) to all ranks, and read bytes[s] of rank s into `to[s]`, if any. Broadcast and
   all-gather. */
int dl_spread(Group *g, const void *mine, const uint64_t *bytes, void **to, uint64_t signature, uint64_t site) {
    const int p = g->p, r = g->r;
    uint64_t longest = 0;
    for (int s = 0; s < p; s++) if (bytes[s] > longest) longest = bytes[s];
    if (longest <= g->small) {
        memcpy(mailbox(g, r, g->tick + 1), mine, bytes[r]);
        TRY(enter(g, signature, site, 0, NULL));
        for (int s = 0; s < p; s++)
            if (s != r && to[s]) memcpy(to[s], mailbox(g, s, g->tick), bytes[s]);
        return OK;
    }
    uint32_t steps, base = g->step;
    TRY(enter(g, signature, site, (uint32_t)ceil_div(longest, g->slot), &steps));
    for (uint32_t n = 0; n < steps; n++) {
        for (uint32_t w = n == 0 ? 0 : n + 1; w < n + 2 && w < steps; w++) {
            uint64_t at = w * g->slot;
            if (at >= bytes[r]) continue;
            TRY(ALL(done, base + w + 1 - SLOTS, 1));
            memcpy(in_slot(g, r, base + w), (const char *)mine + at, min_u64(g->slot, bytes[r] - at));
            raise_to(&control(g, r)->in, base + w + 1);
        }
        uint64_t at = n * g->slot;
        for (int k = 1; k < p; k++) {
            int s = (r + k) % p;
            if (!to[s] || at >= bytes[s]) continue;
            TRY(await(g, &control(g, s)->in, base + n + 1, s, 2));
            memcpy((char *)to[s] + at, in_slot(g, s, base + n), min_u64(g->slot, bytes[s] - at));
        }
        raise_to(&control(g, r)->done, base + n + 1);
    }
    g->step = base + steps;
    return OK;
}

/* All-to-all: `out[s]` (`send_bytes[s]` bytes) goes to s, `in[s]` gets recv_bytes[s] bytes from s. */
int dl_exchange(Group *g, const void **out, const uint64_t *send_bytes, void **in, const uint64_t *recv_bytes,
                uint64_t signature, uint64_t site) {
    const int p = g->p, r = g->r;
    const uint64_t room = g->slot / p / LINE * LINE, table = (uint64_t)p * sizeof(uint64_t);
    uint64_t longest = 0;
    char *mine = mailbox(g, r, g->tick + 1);
    memcpy(mine, send_bytes, table);
    memcpy(mine + table, recv_bytes, table);
    for (int s = 0; s < p; s++) {
        if (s == r) continue;
        if (send_bytes[s] > longest) longest = send_bytes[s];
        if (recv_bytes[s] > longest) longest = recv_bytes[s];
    }
    uint32_t steps, base = g->step;
    TRY(enter(g, signature, site, (uint32_t)ceil_div(longest, room), &steps));
    /* Sizes must agree for every pair; all ranks check all pairs, so that all refuse together. */
    for (int a = 0; a < p; a++)
        for (int b = 0; b < p; b++)
            if (((uint64_t *)mailbox(g, a, g->tick))[b] != ((uint64_t *)(mailbox(g, b, g->tick) + table))[a])
                return MISMATCH;
    for (uint32_t n = 0; n < steps; n++) {
        for (uint32_t w = n == 0 ? 0 : n + 1; w < n + 2 && w < steps; w++) {
            TRY(ALL(done, base + w + 1 - SLOTS, 1));
            uint64_t at = w * room;
            for (int k = 1; k < p; k++) {
                int s = (r + k) % p;
                if (at < send_bytes[s])
                    memcpy(in_slot(g, r, base + w) + room * s, (const char *)out[s] + at,
                           min_u64(room, send_bytes[s] - at));
            }
            raise_to(&control(g, r)->in, base + w + 1);
        }
        uint64_t at = n * room;
        for (int k = 1; k < p; k++) {
            int s = (r + k) % p;
            if (at >= recv_bytes[s]) continue;
            TRY(await(g, &control(g, s)->in, base + n + 1, s, 2));
            memcpy((char *)in[s] + at, in_slot(g, s, base + n) + room * r, min_u64(room, recv_bytes[s] - at));
        }
        raise_to(&control(g, r)->done, base + n + 1);
    }
    g->step = base + steps;
    return OK;
}

/* Only the comparison of calls: a barrier. */
int dl_barrier(Group *g, uint64_t signature, uint64_t site) { return enter(g, signature, site, 0, NULL); }

/* ------------------------------------------------------------------------------------------ rings */

static inline Ring *ring(Group *g, int src, int dst) {
    return (Ring *)(g->base + g->ring_at + (uint64_t)(src * g->p + dst) * (sizeof(Ring) + g->ring));
}

static void ring_bell(Group *g, int s) {
    Counter *b = &control(g, s)->bell;
    /* The bell has many writers: it is the only counter that is incremented atomically. */
    atomic_fetch_add(&b->value, 1);
    if (atomic_load(&b->sleepers)) syscall(SYS_futex, &b->value, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
}

/* Write as much as there is room for; returns the number of bytes. With `bell` the reader is woken. */
uint64_t dl_ring_write(Group *g, int dst, const void *from, uint64_t n, int bell) {
    Ring *q = ring(g, g->r, dst);
    char *data = (char *)(q + 1);
    uint64_t head = atomic_load_explicit(&q->head, memory_order_relaxed);
    uint64_t room = g->ring - (head - atomic_load_explicit(&q->tail, memory_order_acquire));
    if (room < n) {
        atomic_store(&q->full, 1);
        room = g->ring - (head - atomic_load(&q->tail));
    }
    n = min_u64(n, room);
    uint64_t at = head & (g->ring - 1), first = min_u64(n, g->ring - at);
    memcpy(data + at, from, first);
    memcpy(data, (const char *)from + first, n - first);
    atomic_store_explicit(&q->head, head + n, memory_order_release);
    if (bell && n) ring_bell(g, dst);
    return n;
}

/* Number of unread bytes from `src`. */
uint64_t dl_ring_waiting(Group *g, int src) {
    Ring *q = ring(g, src, g->r);
    return atomic_load_explicit(&q->head, memory_order_acquire) - atomic_load_explicit(&q->tail, memory_order_relaxed);
}

/* The first rank from `start` on with unread bytes, or -1. */
int dl_ring_any(Group *g, int start) {
    for (int k = 0; k < g->p; k++) {
        int s = (start + k) % g->p;
        if (s != g->r && dl_ring_waiting(g, s)) return s;
    }
    return -1;
}

uint64_t dl_ring_read(Group *g, int src, void *to, uint64_t n) {
    Ring *q = ring(g, src, g->r);
    const char *data = (const char *)(q + 1);
    uint64_t tail = atomic_load_explicit(&q->tail, memory_order_relaxed);
    n = min_u64(n, atomic_load_explicit(&q->head, memory_order_acquire) - tail);
    uint64_t at = tail & (g->ring - 1), first = min_u64(n, g->ring - at);
    memcpy(to, data + at, first);
    memcpy((char *)to + first, data, n - first);
    atomic_store(&q->tail, tail + n);
    if (n && atomic_load(&q->full)) {
        atomic_store(&q->full, 0);
        ring_bell(g, src);
    }
    return n;
}

static int rung(Group *g, Counter *b, uint32_t seen) {
    SPIN(atomic_load_explicit(&b->value, memory_order_acquire) != seen);
    return STOPPED;
}

/* Wait at most `ms` until the bell differs from `seen`; returns its value. */
uint32_t dl_bell(Group *g, uint32_t seen, uint32_t ms) {
    Counter *b = &control(g, g->r)->bell;
    if (ms && rung(g, b, seen)) sleep_on(b, seen, ms);
    return atomic_load_explicit(&b->value, memory_order_acquire);
}

/* The hashes that rank `s` published for this call, for mismatches and crossed call sites. */
void dl_call(Group *g, int s, uint64_t *signature, uint64_t *site) {
    Call *c = &control(g, s)->call[g->tick & 1];
    *signature = c->signature;
    *site = c->site;
}

uint64_t dl_control_size(void) { return sizeof(Control); }
uint64_t dl_ring_size(void) { return sizeof(Ring); }
