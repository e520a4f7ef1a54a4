// residual_decode.c - exact BF16 weights from a residual record and its draft record, on the processor.
// Computes   out = the raw record, less its biases: see "Target records" in docs/format.md, whose words are used here
// Inputs     payload  [payload_bytes] the residual record; any bytes
//            draft    the draft record as `shape` says; any bytes
// Output     out      the matrices at their places in a raw record; nothing else is written
// Returns    0, or 1 for a record that breaks a MUST: `out` is then partly written, and the reader in NumPy says why
// Bounds     every place is checked before it is read; `shape` is trusted
// Speed      rows r and r + 8 of a unit hold the places of lanes 4 r to 4 r + 3 and are decoded together, in 2 KB that
//            stay in the first cache; loops over COLUMNS have a fixed length for the compiler to vectorise; the lines
//            of the next unit, input and output, are asked for meanwhile (without: 1.2 and 1.3 times as long)
// Needs      little endian; compiled by runtime/native.py, tested against the reader in residual.py

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

enum { COLUMNS = 128, UNIT = 2048, PAIRS = 8, BLOCK_UNITS = 8, PIECE = 16 };

typedef struct {
    int64_t rows, columns;
    int64_t paired;                         // gate and up rows share tiles
    int64_t bits;                           // of a code: 4 or 8
    int64_t group_size, groups;             // columns that share a scale; scales of a row
    int64_t codes_at, scales_at, zeros_at;  // in the draft record
    int64_t table_at, blocks;               // of block starts, in the payload
    int64_t out_at;                         // in the raw record
} Matrix;

typedef struct {
    int64_t begin;       // of the first block; a multiple of 16
    int64_t gaps[4][2];  // first and last + 1 of what must be zero before it
    Matrix matrices[2];
} Shape;

// Rows r and r + 8 of a unit.
typedef struct {
    int64_t row[2];                  // of the matrix; -1 behind its end
    int64_t column, columns, group;  // first column, how many are inside, group of the first
    _Alignas(64) uint16_t draft[2][COLUMNS];
    _Alignas(64) uint8_t zero[2][COLUMNS];  // 1 for a zero code, padding included
    _Alignas(64) uint8_t low[2][COLUMNS], nibble[2][COLUMNS];
} Pair;

static uint16_t load16(const uint8_t *at) { uint16_t v; memcpy(&v, at, 2); return v; }
static uint32_t load32(const uint8_t *at) { uint32_t v; memcpy(&v, at, 4); return v; }
static uint64_t load64(const uint8_t *at) { uint64_t v; memcpy(&v, at, 8); return v; }
static int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

static int any(const uint8_t *data, int64_t size) {
    uint8_t bits = 0;
    for (int64_t i = 0; i < size; i++) bits |= data[i];
    return bits != 0;
}

static float from_half(uint16_t half) {  // finite ones only
    const uint32_t rest = half & 0x7FFF;
    uint32_t word = (rest << 13) + ((127 - 15) << 23);
    float value = (float)rest * 0x1p-24f;
    if (rest < 0x400) memcpy(&word, &value, 4);
    word |= (uint32_t)(half & 0x8000) << 16;
    memcpy(&value, &word, 4);
    return value;
}

static uint16_t to_bf16(float value) {  // to nearest, ties to even; finite ones only
    uint32_t word;
    memcpy(&word, &value, 4);
    return (uint16_t)((word + 0x7FFF + (word >> 16 & 1)) >> 16);
}

// Called with a constant where it matters, so that the compiler knows the length.
static inline void unpack(const uint8_t *packed, int64_t size, uint8_t *nibbles) {
    for (int64_t i = 0; i < size; i++) nibbles[2 * i] = packed[i] & 15, nibbles[2 * i + 1] = packed[i] >> 4;
}

static inline void fill(float *scale, uint8_t *zero_code, int64_t size, float value, uint8_t zero) {
    for (int64_t i = 0; i < size; i++) scale[i] = value, zero_code[i] = zero;
}

// Draft values and zero codes of one row of a pair; 0 if a scale is not finite.
static int draft_row(const Matrix *m, const uint8_t *draft, Pair *pair, int which) {
    const int64_t row = pair->row[which], count = row < 0 ? 0 : pair->columns;
    uint8_t code[COLUMNS], zero_code[COLUMNS];
    float scale[COLUMNS];
    if (count < COLUMNS) memset(code, 0, COLUMNS), memset(zero_code, 0, COLUMNS), memset(scale, 0, sizeof scale);
    int64_t group = pair->group, next;
    for (int64_t at = 0; at < count; at = next, group++) {
        const uint16_t half = load16(draft + m->scales_at + 2 * (row * m->groups + group));
        const uint8_t zero = draft[m->zeros_at + row * m->groups + group];
        const float value = from_half(half);
        if ((half & 0x7C00) == 0x7C00) return 0;
        next = (group + 1) * m->group_size - pair->column;
        next = next < count ? next : count;
        if (next - at == COLUMNS)
            fill(scale, zero_code, COLUMNS, value, zero);
        else
            fill(scale + at, zero_code + at, next - at, value, zero);
    }
    const uint8_t *codes = draft + m->codes_at + (row * m->columns + pair->column) * m->bits / 8;
    if (m->bits == 8)
        memcpy(code, codes, (size_t)count);
    else if (count == COLUMNS)
        unpack(codes, COLUMNS / 2, code);
    else
        unpack(codes, count / 2, code);
    for (int i = 0; i < COLUMNS; i++) {
        const int is_zero = code[i] == zero_code[i];
        pair->draft[which][i] = to_bf16((float)(code[i] - zero_code[i] + is_zero) * scale[i]);  // an exact product
        pair->zero[which][i] = (uint8_t)is_zero;
    }
    return 1;
}

// The low bytes of a pair, four columns of the one row and four of the other in turn, the middle two exchanged.
static void low_bytes(const uint8_t *data, Pair *pair) {
    uint32_t words[COLUMNS / 2], rows[2][COLUMNS / 4];
    for (int piece = 0; piece < 4; piece++) memcpy(words + 16 * piece, data + piece * (UNIT / 4), 64);
    for (int i = 0; i < COLUMNS / 2; i++)
        words[i] = (words[i] & 0xFF0000FF) | (words[i] >> 8 & 0xFF00) | (words[i] & 0xFF00) << 8;
    for (int i = 0; i < COLUMNS / 4; i++) rows[0][i] = words[2 * i], rows[1][i] = words[2 * i + 1];
    memcpy(pair->low, rows, sizeof rows);
}

// 16 flags as bits, the first one lowest.
static uint64_t bits_of(const uint8_t *flags) {
#ifdef __SSE2__
    return (uint32_t)_mm_movemask_epi8(_mm_slli_epi16(_mm_loadu_si128((const __m128i *)flags), 7));
#else
    uint64_t halves[2];
    memcpy(halves, flags, sizeof halves);
    return (halves[0] * 0x0102040810204080u >> 56) | (halves[1] * 0x0102040810204080u >> 56) << 8;
#endif
}

// The nibbles of `stream`, the lowest first, to the places of `flags`, 4 bits each; the other places get 0.
static uint64_t deposit(uint64_t stream, uint64_t flags) {
#ifdef __BMI2__
    return _pdep_u64(stream, _pdep_u64(flags, 0x1111111111111111u) * 15);
#else
    uint64_t placed = 0;
    for (; flags; flags &= flags - 1, stream >>= 4) placed |= (stream & 15) << 4 * __builtin_ctzll(flags);
    return placed;
#endif
}

// Give the zero codes of a pair their nibbles and return how many there are.
// `stream` has the unit's nibbles from number `next` on and is followed by 9 bytes that may be read.
static int64_t place_nibbles(Pair *pair, const uint8_t *stream, int64_t next) {
    // Places come two columns of the one row, two of the other: 16 of a lane, the next lane, then the next piece.
    uint16_t rows[2][COLUMNS / 2], in_turn[COLUMNS];
    uint8_t flags[2 * COLUMNS], packed[COLUMNS];
    memcpy(rows, pair->zero, sizeof rows);
    for (int i = 0; i < COLUMNS / 2; i++) in_turn[2 * i] = rows[0][i], in_turn[2 * i + 1] = rows[1][i];
    memcpy(flags, in_turn, sizeof flags);
    const int64_t first = next;
    for (int lane = 0; lane < 4; lane++)
        for (int piece = 0; piece < 4; piece++) {
            const uint64_t bits = bits_of(flags + 64 * piece + 16 * lane);
            const uint8_t *at = stream + next / 2;
            const int odd = 4 * (next & 1);
            const uint64_t placed = deposit(load64(at) >> odd | (uint64_t)at[8] << 1 << (63 - odd), bits);
            memcpy(packed + 32 * piece + 8 * lane, &placed, 8);
            next += __builtin_popcountll(bits);
        }
    for (int i = 0; i < COLUMNS / 2; i++)
        for (int which = 0; which < 2; which++) {
            pair->nibble[which][2 * i] = packed[2 * i + which] & 15;
            pair->nibble[which][2 * i + 1] = packed[2 * i + which] >> 4;
        }
    return next - first;
}

// Put the words of a row together from draft, low bytes and nibbles.
static void write_row(const Pair *pair, int which, uint8_t *out) {
    const uint16_t *draft = pair->draft[which];
    const uint8_t *zero = pair->zero[which], *low = pair->low[which], *nibble = pair->nibble[which];
    uint16_t words[COLUMNS];
    for (int i = 0; i < COLUMNS; i++) {
        const uint16_t near = (uint16_t)(draft[i] + 127 - low[i]) & 0xFF00;
        const int16_t steps = (int16_t)((draft[i] >> 8 & 127) - (nibble[i] & 7));
        const uint16_t of_zero = (uint16_t)((nibble[i] >> 3 << 15) | (steps > 0 ? steps : 0) << 8);
        words[i] = (uint16_t)((zero[i] ? of_zero : near) | low[i]);
    }
    memcpy(out, words, (size_t)(2 * pair->columns));
}

static void set_rows(const Matrix *m, int64_t tile, int pair_id, Pair *pair) {
    const int64_t rows = m->paired ? m->rows / 2 : m->rows;
    const int64_t first = (m->paired ? 8 : 16) * tile + pair_id, second = m->paired ? first : first + 8;
    pair->row[0] = first < rows ? first : -1;
    pair->row[1] = second < rows ? second + (m->paired ? rows : 0) : -1;
}

// The words of a unit, exceptions not yet applied; 0 if it breaks a MUST.
static int guess_unit(const Matrix *m, const uint8_t *draft, int64_t tile, const uint8_t *lows, const uint8_t *words,
                      int64_t num_words, Pair *pair, uint8_t *out) {
    uint8_t stream[UNIT / 2 + 16] = {0};  // no unit has more, and reading on is harmless here
    if (num_words > UNIT / 8) return 0;
    memcpy(stream, words, (size_t)(4 * num_words));
    int64_t nibbles = 0;
    for (int pair_id = 0; pair_id < PAIRS; pair_id++) {
        set_rows(m, tile, pair_id, pair);
        if (!draft_row(m, draft, pair, 0) || !draft_row(m, draft, pair, 1)) return 0;
        low_bytes(lows + 64 * pair_id, pair);
        for (int piece = 0; piece < 4; piece++) __builtin_prefetch(lows + UNIT + piece * (UNIT / 4) + 64 * pair_id);
        nibbles += place_nibbles(pair, stream, nibbles);
        for (int which = 0; which < 2; which++) {
            const int64_t inside = pair->row[which] < 0 ? 0 : pair->columns;
            if (any(pair->low[which] + inside, COLUMNS - inside)) return 0;
            if (any(pair->nibble[which] + inside, COLUMNS - inside)) return 0;
            if (!inside) continue;
            uint8_t *words_out = out + 2 * (pair->row[which] * m->columns + pair->column);
            for (int line = 0; line < 4; line++) __builtin_prefetch(words_out + 2 * COLUMNS + 64 * line, 1);
            write_row(pair, which, words_out);
        }
    }
    return (nibbles + 7) / 8 == num_words;
}

// Replace the high bytes that are listed; 0 if their places break a MUST.
static int except(const Matrix *m, int64_t tile, const uint8_t *places, const uint8_t *highs, int64_t count, Pair *pair,
                  uint8_t *out) {
    int last = -1;
    for (int64_t i = 0; i < count; i++) {
        const int place = load16(places + 2 * i);
        if (place <= last || place >= UNIT) return 0;
        last = place;
        const int lane = place / 64, e = place % 64;
        const int column = 32 * (e / 16) + 8 * (lane % 4) + 4 * (e / 8 % 2) + 2 * (e / 4 % 2) + e % 2;
        set_rows(m, tile, lane / 4, pair);
        const int64_t row = pair->row[e / 2 % 2];
        if (row < 0 || column >= pair->columns) return 0;
        out[2 * (row * m->columns + pair->column + column) + 1] = highs[i];
    }
    return 1;
}

static int decode_block(const Matrix *m, const uint8_t *draft, const uint8_t *data, int64_t size, int64_t tile,
                        int64_t first, int64_t units, Pair *pair, uint8_t *out) {
    const int64_t table_at = units * UNIT, table_end = table_at + 4 * (units + 1);
    const int64_t words_at = round_up(table_end, PIECE);
    if (words_at > size) return 0;
    const uint8_t *table = data + table_at;
    const int64_t words = load16(table + 4 * units), exceptions = load16(table + 4 * units + 2);
    const int64_t places_at = words_at + 4 * words, highs_at = places_at + 2 * exceptions;
    if (round_up(highs_at + exceptions, PIECE) != size || load32(table) != 0) return 0;
    if (any(data + table_end, words_at - table_end)) return 0;
    if (any(data + highs_at + exceptions, size - highs_at - exceptions)) return 0;
    for (int64_t i = 0; i < units; i++, table += 4) {
        const int64_t word = load16(table), exception = load16(table + 2);
        const int64_t next_word = load16(table + 4), next_exception = load16(table + 6);
        if (next_word < word || next_word > words || next_exception < exception || next_exception > exceptions) return 0;
        pair->column = (first + i) * COLUMNS;
        pair->group = pair->column / m->group_size;
        pair->columns = m->columns - pair->column < COLUMNS ? m->columns - pair->column : COLUMNS;
        if (!guess_unit(m, draft, tile, data + i * UNIT, data + words_at + 4 * word, next_word - word, pair, out)) return 0;
        if (!except(m, tile, data + places_at + 2 * exception, data + highs_at + exception, next_exception - exception,
                    pair, out))
            return 0;
    }
    return 1;
}

// Part `part` of `parts` of the blocks of each matrix; the parts of a record may be decoded at the same time.
int residual_decode(const Shape *shape, const uint8_t *payload, int64_t payload_bytes, const uint8_t *draft,
                    uint8_t *out, int64_t part, int64_t parts) {
    Pair pair;
    memset(&pair, 0, sizeof pair);
    int64_t end = shape->begin;
    if (payload_bytes < end) return 1;
    for (int i = 0; i < 4; i++)
        if (any(payload + shape->gaps[i][0], shape->gaps[i][1] - shape->gaps[i][0])) return 1;
    for (int i = 0; i < 2; i++) {
        const Matrix *m = &shape->matrices[i];
        const uint8_t *starts = payload + m->table_at;
        const int64_t units = (m->columns + COLUMNS - 1) / COLUMNS, in_tile = (units + BLOCK_UNITS - 1) / BLOCK_UNITS;
        if (PIECE * (int64_t)load32(starts) != end) return 1;
        end = PIECE * (int64_t)load32(starts + 4 * m->blocks);
        for (int64_t block = m->blocks * part / parts; block < m->blocks * (part + 1) / parts; block++) {
            const int64_t start = PIECE * (int64_t)load32(starts + 4 * block);
            const int64_t stop = PIECE * (int64_t)load32(starts + 4 * block + 4);
            const int64_t first = block % in_tile * BLOCK_UNITS, left = units - first;
            if (start < shape->begin || stop < start || stop > payload_bytes) return 1;
            if (!decode_block(m, draft, payload + start, stop - start, block / in_tile, first,
                              left < BLOCK_UNITS ? left : BLOCK_UNITS, &pair, out + m->out_at))
                return 1;
        }
    }
    return end != payload_bytes;
}
