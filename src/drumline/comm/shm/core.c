/* Collectives and byte rings in memory that processes of one host share. Compiled at first use by native.py.

   The letters: p ranks, r this rank, s another rank, n a step. A buffer that does not fit is moved in steps; step n uses
   slot n % SLOTS of every rank's staging memory. Small slots stay in cache, so a byte crosses main memory only where it
   is read from, or written to, the caller's own buffer. Steps are numbered through all collectives of a group, and all
   counters only grow, so nothing is ever reset.

   Every counter has one writer. `enter`: calls begun. `in`: steps of which this rank's own data is in its slot.
   `out`: steps of which its reduced share is. `done`: steps that it has finished reading, so their slots are free.
   All slots are free when all ranks have entered a call, because then all have left the one before. */

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
#define STOPPED 1   /* the callback said so: a peer died, or time is up */
#define MISMATCH 2  /* the ranks called different things */

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

/* What is to be done when a wait lasts: (rank waited for, which counter) -> nonzero to stop waiting. */
typedef int (*Slow)(int rank, int what);

typedef struct {
    char *base;       /* of the shared memory */
    int32_t p, r;
    uint64_t small;   /* bytes of a rank's mailbox for short buffers, twice there */
    uint64_t slot;    /* bytes of one staging slot */
    uint64_t ring;    /* bytes of one ring, a power of two */
    uint64_t control_at, small_at, in_at, out_at, ring_at; /* places in the shared memory */
    uint32_t tick;    /* calls begun */
    uint32_t step;    /* steps of all calls that have ended */
    uint32_t spin_ns, yield_ns; /* how long a wait looks, and lets others run, before it sleeps */
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
    /* A sleeper counts itself before it looks at the value; we write the value before we look at the count. */
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

/* Look often, then let others run between looks, then sleep: short waits are fast and long ones cost nothing. */
#define LOOK(ready) do { \
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
    LOOK(reached(c, target));
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

/* Begin a call: say what it is and how many steps it needs here, and learn the same of all others. */
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
#define TRUE_OR(a, b) ((a) || (b))
#define TRUE_AND(a, b) ((a) && (b))

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
#define WHOLE(T) \
    NUMBERS(T) \
    switch (op) { \
        case BAND: LOOP(T, AND); \
        case BOR: LOOP(T, OR); \
        case BXOR: LOOP(T, XOR); \
    }

static void pair(void *dst, const void *a, const void *b, uint64_t count, int dtype, int op) {
    switch (dtype) {
        case F32: NUMBERS(float) return;
        case F64: NUMBERS(double) return;
        case I8: WHOLE(int8_t) return;
        case U8: WHOLE(uint8_t) return;
        case I16: WHOLE(int16_t) return;
        case U16: WHOLE(uint16_t) return;
        case I32: WHOLE(int32_t) return;
        case U32: WHOLE(uint32_t) return;
        case I64: WHOLE(int64_t) return;
        case U64: WHOLE(uint64_t) return;
        case BOOL:
            switch (op) {
                case SUM: case MAX: case BOR: LOOP(uint8_t, TRUE_OR);
                case PRODUCT: case MIN: case BAND: LOOP(uint8_t, TRUE_AND);
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

/* Half types are added up in float and rounded once. */
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
                pair(acc, acc, other, n, F32, op); \
            } \
            if (op == AVG) for (uint64_t i = 0; i < n; i++) acc[i] /= (float)p; \
            uint16_t *d = (uint16_t *)dst + at; \
            for (uint64_t i = 0; i < n; i++) d[i] = TO(acc[i]); \
        } \
    } while (0)

static const uint64_t item[] = {4, 8, 2, 2, 1, 1, 2, 4, 8, 1, 8, 16, 2, 4, 8};

/* dst = from[0] op from[1] op ... in the order of ranks, so that everybody who computes it has the same bits. */
static void fold(void *dst, const void **from, int p, uint64_t count, int dtype, int op) {
    if (dtype == BF16) { HALF(from_bf16, to_bf16); return; }
    if (dtype == F16) { HALF(from_f16, to_f16); return; }
    if (p == 1) { if (dst != from[0]) memcpy(dst, from[0], count * item[dtype]); return; }
    /* dst may be one of the sources: of a late one a tile is computed aside, because it is needed until then. */
    const uint64_t size = item[dtype], tile = 8192 / size;
    char acc[8192] __attribute__((aligned(64)));
    int direct = 1;
    for (int s = 2; s < p; s++) if (from[s] == dst) direct = 0;
    for (uint64_t at = 0; at < count; at += tile) {
        uint64_t n = count - at < tile ? count - at : tile;
        char *d = (char *)dst + at * size, *to = direct ? d : acc;
        pair(to, (const char *)from[0] + at * size, (const char *)from[1] + at * size, n, dtype, op);
        for (int s = 2; s < p; s++) pair(to, to, (const char *)from[s] + at * size, n, dtype, op);
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

static inline uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

/* Where share s of block n lies: blocks are equal but for the last, shares within a block likewise. In elements. */
typedef struct { uint64_t block, share, count; int p; } Cut;
static inline void part(const Cut *c, uint64_t n, int s, uint64_t *at, uint64_t *len) {
    uint64_t start = n * c->block, stop = least(start + c->block, c->count), share = up(stop - start, c->p);
    *at = least(start + share * s, stop);
    *len = least(*at + share, stop) - *at;
}

/* Two ranks: both lay out everything and both add it up. What a rank lays out next goes into the memory that it has just
   read, so the lines are in its cache already. In slots that each rank kept for itself, a line had to cross once more
   before it was written again, and the call took half as long again (docs/bench.md). Nobody waits for room either:
   who has read a place may write to it. */
#define AHEAD 2     /* blocks that are laid out before the first is read */
#define TOUCH 2048  /* bytes read and written anew at a time: they are still in the first cache */

static inline char *swap_slot(Group *g, int s, uint32_t n) { return in_slot(g, (s + n / AHEAD) % 2, n % AHEAD); }

/* Add what lies at `place` to x and leave `next` there, in one pass: each line of the other's memory is touched once. Only
   for sums of floats, where the order of two does not matter; whether it was done. */
#define TRADE(T) do { \
        T *x_ = x, *p_ = place; const T *n_ = next; \
        _Pragma("GCC ivdep") \
        for (uint64_t i = 0; i < count; i++) { T other_ = p_[i]; p_[i] = n_[i]; x_[i] += other_; } \
        return 1; \
    } while (0)
static inline int trade(void *x, void *place, const void *next, uint64_t count, int dtype) {
    if (dtype == F32) TRADE(float);
    if (dtype == F64) TRADE(double);
    return 0;
}

static int swap(Group *g, char *x, uint64_t count, uint64_t size, int dtype, int op, uint64_t signature, uint64_t site) {
    const int r = g->r;
    const uint64_t each = g->slot / size, tile = TOUCH / size;
    Control *mine = control(g, r), *peer = control(g, 1 - r);
    uint32_t steps, base = g->step;
    const void *from[2];
    TRY(enter(g, signature, site, (uint32_t)up(count, each), &steps));
    for (uint32_t w = 0; w < AHEAD && w < steps; w++) {
        memcpy(swap_slot(g, r, base + w), x + w * each * size, least(each, count - w * each) * size);
        raise_to(&mine->in, base + w + 1);
    }
    for (uint32_t n = 0; n < steps; n++) {
        const uint64_t start = n * each, stop = least(start + each, count);
        char *slot = swap_slot(g, 1 - r, base + n);
        TRY(await(g, &peer->in, base + n + 1, 1 - r, 2));
        for (uint64_t at = start; at < stop; at += tile) {
            const uint64_t next = at + AHEAD * each;
            char *place = slot + (at - start) * size;
            if (op == SUM && next + tile <= count && trade(x + at * size, place, x + next * size, tile, dtype)) continue;
            from[r] = x + at * size;
            from[1 - r] = place;
            fold(x + at * size, from, 2, least(tile, stop - at), dtype, op);
            if (next < count) memcpy(place, x + next * size, least(tile, count - next) * size);
        }
        if (n + AHEAD < steps) raise_to(&mine->in, base + n + AHEAD + 1);
    }
    raise_to(&mine->done, base + steps);
    g->step = base + steps;
    return OK;
}

/* Every rank (root < 0), or the root, ends with the reduction. In each step a rank lays out what others own, adds up
   its own share of all ranks, lays out the result, and takes the others' results of the step before. */
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
        if (p > 1) fold(x, from, p, count, dtype, op);
        return OK;
    }
    if (p == 2 && root < 0) return swap(g, x, count, size, dtype, op, signature, site);
    const uint64_t most = g->slot / size / p * p; /* elements of a block: a slot holds one share for each rank */
    const uint64_t blocks = up(count, most);
    const Cut cut = {up(up(count, blocks), p) * p, 0, count, p};
    const uint64_t room = g->slot / size / p * size;
    uint32_t steps, base = g->step;
    TRY(enter(g, signature, site, (uint32_t)up(count, cut.block), &steps));
    uint64_t at, len;
    for (uint32_t n = 0; n < steps + 1; n++) {
        /* the first step lays out two blocks, so that nobody waits for the slowest at each step */
        for (uint32_t w = n == 0 ? 0 : n + 1; w < n + 2 && w < steps; w++) {
            TRY(ALL(done, base + w + 1 - SLOTS, 1));
            for (int k = 1; k < p; k++) {
                int s = (r + k) % p;
                part(&cut, w, s, &at, &len);
                memcpy(in_slot(g, r, base + w) + room * s, x + at * size, len * size);
            }
            raise_to(&control(g, r)->in, base + w + 1);
        }
        if (n < steps) {
            TRY(ALL(in, base + n + 1, 2));
            part(&cut, n, r, &at, &len);
            for (int s = 0; s < p; s++) from[s] = s == r ? x + at * size : in_slot(g, s, base + n) + room * r;
            if (root < 0 || root != r) {
                char *out = out_slot(g, r, base + n);
                fold(out, from, p, len, dtype, op);
                if (root < 0) memcpy(x + at * size, out, len * size);
            } else {
                fold(x + at * size, from, p, len, dtype, op);
            }
            raise_to(&control(g, r)->out, base + n + 1);
        }
        if (n > 0) {
            if (root < 0 || root == r) {
                for (int k = 1; k < p; k++) {
                    int s = (r + k) % p;
                    TRY(await(g, &control(g, s)->out, base + n, s, 3));
                    part(&cut, n - 1, s, &at, &len);
                    memcpy(x + at * size, out_slot(g, s, base + n - 1), len * size);
                }
            }
            raise_to(&control(g, r)->done, base + n);
        }
    }
    g->step = base + steps;
    return OK;
}

/* Rank r ends with share r of the reduction: `blocks[s]` is what this rank gives to s, each of `count` elements. */
int dl_reduce_scatter(Group *g, const void **blocks, void *out, uint64_t count, uint64_t size, int dtype, int op,
                      uint64_t signature, uint64_t site) {
    const int p = g->p, r = g->r;
    const void *from[p];
    const uint64_t room = g->slot / size / p * size, each = room / size;
    uint32_t steps, base = g->step;
    TRY(enter(g, signature, site, (uint32_t)up(count, each), &steps));
    for (uint32_t n = 0; n < steps; n++) {
        for (uint32_t w = n == 0 ? 0 : n + 1; w < n + 2 && w < steps; w++) {
            TRY(ALL(done, base + w + 1 - SLOTS, 1));
            uint64_t at = w * each, len = least(each, count - at);
            for (int k = 1; k < p; k++) {
                int s = (r + k) % p;
                memcpy(in_slot(g, r, base + w) + room * s, (const char *)blocks[s] + at * size, len * size);
            }
            raise_to(&control(g, r)->in, base + w + 1);
        }
        TRY(ALL(in, base + n + 1, 2));
        uint64_t at = n * each, len = least(each, count - at);
        for (int s = 0; s < p; s++)
            from[s] = s == r ? (const char *)blocks[r] + at * size : in_slot(g, s, base + n) + room * r;
        fold((char *)out + at * size, from, p, len, dtype, op);
        raise_to(&control(g, r)->done, base + n + 1);
    }
    g->step = base + steps;
    return OK;
}

/* Everybody may read what anybody lays out: `mine` of `bytes[r]` bytes goes out, `to[s]` (if any) gets bytes[s] of s.
   Broadcast and all-gather. */
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
    TRY(enter(g, signature, site, (uint32_t)up(longest, g->slot), &steps));
    for (uint32_t n = 0; n < steps; n++) {
        for (uint32_t w = n == 0 ? 0 : n + 1; w < n + 2 && w < steps; w++) {
            uint64_t at = w * g->slot;
            if (at >= bytes[r]) continue;
            TRY(ALL(done, base + w + 1 - SLOTS, 1));
            memcpy(in_slot(g, r, base + w), (const char *)mine + at, least(g->slot, bytes[r] - at));
            raise_to(&control(g, r)->in, base + w + 1);
        }
        uint64_t at = n * g->slot;
        for (int k = 1; k < p; k++) {
            int s = (r + k) % p;
            if (!to[s] || at >= bytes[s]) continue;
            TRY(await(g, &control(g, s)->in, base + n + 1, s, 2));
            memcpy((char *)to[s] + at, in_slot(g, s, base + n), least(g->slot, bytes[s] - at));
        }
        raise_to(&control(g, r)->done, base + n + 1);
    }
    g->step = base + steps;
    return OK;
}

/* Everybody has something for everybody: `out[s]` of `gives[s]` bytes goes to s, `in[s]` gets takes[s] of s. */
int dl_exchange(Group *g, const void **out, const uint64_t *gives, void **in, const uint64_t *takes, uint64_t signature,
                uint64_t site) {
    const int p = g->p, r = g->r;
    const uint64_t room = g->slot / p / LINE * LINE, table = (uint64_t)p * sizeof(uint64_t);
    uint64_t longest = 0;
    char *mine = mailbox(g, r, g->tick + 1);
    memcpy(mine, gives, table);
    memcpy(mine + table, takes, table);
    for (int s = 0; s < p; s++) {
        if (s == r) continue;
        if (gives[s] > longest) longest = gives[s];
        if (takes[s] > longest) longest = takes[s];
    }
    uint32_t steps, base = g->step;
    TRY(enter(g, signature, site, (uint32_t)up(longest, room), &steps));
    /* What a gives b must be what b takes of a; all ranks look at all pairs, so that all refuse together. */
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
                if (at < gives[s])
                    memcpy(in_slot(g, r, base + w) + room * s, (const char *)out[s] + at, least(room, gives[s] - at));
            }
            raise_to(&control(g, r)->in, base + w + 1);
        }
        uint64_t at = n * room;
        for (int k = 1; k < p; k++) {
            int s = (r + k) % p;
            if (at >= takes[s]) continue;
            TRY(await(g, &control(g, s)->in, base + n + 1, s, 2));
            memcpy((char *)in[s] + at, in_slot(g, s, base + n) + room * r, least(room, takes[s] - at));
        }
        raise_to(&control(g, r)->done, base + n + 1);
    }
    g->step = base + steps;
    return OK;
}

/* Nothing but the comparison: a barrier, and what wrong calls are found by. */
int dl_barrier(Group *g, uint64_t signature, uint64_t site) { return enter(g, signature, site, 0, NULL); }

/* ------------------------------------------------------------------------------------------ rings */

static inline Ring *ring(Group *g, int src, int dst) {
    return (Ring *)(g->base + g->ring_at + (uint64_t)(src * g->p + dst) * (sizeof(Ring) + g->ring));
}

static void ring_bell(Group *g, int s) {
    Counter *b = &control(g, s)->bell;
    /* The bell has many writers: it is the one counter that is added to. */
    atomic_fetch_add(&b->value, 1);
    if (atomic_load(&b->sleepers)) syscall(SYS_futex, &b->value, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
}

/* Write as much as there is room for; how much that was. With `bell` the reader is woken. */
uint64_t dl_ring_write(Group *g, int dst, const void *from, uint64_t n, int bell) {
    Ring *q = ring(g, g->r, dst);
    char *data = (char *)(q + 1);
    uint64_t head = atomic_load_explicit(&q->head, memory_order_relaxed);
    uint64_t room = g->ring - (head - atomic_load_explicit(&q->tail, memory_order_acquire));
    if (room < n) {
        atomic_store(&q->full, 1);
        room = g->ring - (head - atomic_load(&q->tail));
    }
    n = least(n, room);
    uint64_t at = head & (g->ring - 1), first = least(n, g->ring - at);
    memcpy(data + at, from, first);
    memcpy(data, (const char *)from + first, n - first);
    atomic_store_explicit(&q->head, head + n, memory_order_release);
    if (bell && n) ring_bell(g, dst);
    return n;
}

/* How many bytes of `src` wait to be read. */
uint64_t dl_ring_waiting(Group *g, int src) {
    Ring *q = ring(g, src, g->r);
    return atomic_load_explicit(&q->head, memory_order_acquire) - atomic_load_explicit(&q->tail, memory_order_relaxed);
}

/* The first rank from `start` on of whom something waits to be read, or -1. */
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
    n = least(n, atomic_load_explicit(&q->head, memory_order_acquire) - tail);
    uint64_t at = tail & (g->ring - 1), first = least(n, g->ring - at);
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
    LOOK(atomic_load_explicit(&b->value, memory_order_acquire) != seen);
    return STOPPED;
}

/* Wait until the bell has rung since it was `seen`, at most `ms`; what it is now. */
uint32_t dl_bell(Group *g, uint32_t seen, uint32_t ms) {
    Counter *b = &control(g, g->r)->bell;
    if (ms && rung(g, b, seen)) sleep_on(b, seen, ms);
    return atomic_load_explicit(&b->value, memory_order_acquire);
}

/* What the rank `s` said when it entered this call, for the words of a mismatch and for crossings of call sites. */
void dl_call(Group *g, int s, uint64_t *signature, uint64_t *site) {
    Call *c = &control(g, s)->call[g->tick & 1];
    *signature = c->signature;
    *site = c->site;
}

uint64_t dl_control_size(void) { return sizeof(Control); }
uint64_t dl_ring_size(void) { return sizeof(Ring); }
