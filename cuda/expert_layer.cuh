// expert_layer.cuh - the layer that a kernel for few tokens is compiled for, as the launcher defines it; defaults are for tools.
#pragma once
#define INT4 0
#define INT8 1
#define BF16 2
#ifndef FORM
#define FORM INT4
#endif
#ifndef SCALE_SETS
#define SCALE_SETS 1   // scale sets a unit: groups of 128 k or more 1, of 64 2, of 32 4
#endif
#ifndef HIDDEN
#define HIDDEN 2048
#define INTER 1408
#define TOP_K 4
#define NUM_EXPERTS 60
#endif
#ifndef MAX_TOKENS
#define MAX_TOKENS 8   // of a call: 8 or 16
#endif
#ifndef MAX_PAIRS
#define MAX_PAIRS (MAX_TOKENS * TOP_K)
#endif
#ifndef BIAS
#define BIAS 0
#endif
#ifndef RECORDS
#define RECORDS 0      // whether an expert has a record beside its slot (moe_residual.cu)
#endif
#ifndef INTERLEAVE
#define INTERLEAVE 1   // experts whose tiles alternate in the pool (code forms)
#endif
#ifndef SLOT_BYTES
#define SLOT_BYTES 4460544ull
#endif
#ifndef DOWN_OFFSET
#define DOWN_OFFSET 2973696ull
#endif
#ifndef BIAS_OFFSET
#define BIAS_OFFSET 0ull   // of gate_up_bias [2 * INTER]; down_bias [HIDDEN] at DOWN_BIAS_OFFSET
#define DOWN_BIAS_OFFSET 0ull
#endif

#define CODE_BYTES (FORM == INT4 ? 1024 : 2048)
#define TILES1 (INTER / 8)                // of 8 gate and 8 up rows
#define TILES2 ((HIDDEN + 15) / 16)       // of 16 output rows
#define COLUMNS 8                         // tokens of an MMA, and of an entry of the list: an expert with more tokens has several entries
#define LEVELS ((MAX_TOKENS + COLUMNS - 1) / COLUMNS)
#define GATHER (MAX_TOKENS > COLUMNS)     // an entry's columns hold the tokens of its expert; else column t is token t
#define EXPERT_WORDS ((NUM_EXPERTS + 31) / 32)
#define MAX_ACTIVE (MAX_PAIRS < NUM_EXPERTS + MAX_PAIRS / 8 ? MAX_PAIRS : NUM_EXPERTS + MAX_PAIRS / 8)
#define NO_PAIR 0xffffu

// The list of active experts in shared memory, behind what a kernel has of its own: from OFF_LISTS, a multiple of 8, on
#define OFF_WEIGHT OFF_LISTS                                       // f32 [MAX_PAIRS]
#define OFF_PLACE (OFF_WEIGHT + MAX_PAIRS * 4)                     // int [MAX_PAIRS] slot of a pair's expert
#define OFF_MASK (OFF_PLACE + MAX_PAIRS * 4)                       // u32 [NUM_EXPERTS] tokens of an expert
#define OFF_SLOT (OFF_MASK + (NUM_EXPERTS + 1) / 2 * 8)            // int [NUM_EXPERTS]
#define OFF_LIST (OFF_SLOT + (NUM_EXPERTS + 1) / 2 * 8)            // int2 [MAX_ACTIVE]: slot, one of the pairs
#define OFF_WORDS (OFF_LIST + MAX_ACTIVE * 8)                      // u32 [LEVELS][EXPERT_WORDS]: experts with more than 8 * level tokens; then the block's claim
#define OFF_PAIRS (OFF_WORDS + (LEVELS * EXPERT_WORDS + 1) * 4)    // u16 [MAX_ACTIVE][COLUMNS]: pair of a column, NO_PAIR
#define OFF_RECORD ((OFF_PAIRS + MAX_ACTIVE * COLUMNS * 2 + 3) / 4 * 4)   // int [NUM_EXPERTS], int [MAX_ACTIVE]: slots of records
#define SHARED_BYTES (RECORDS ? OFF_RECORD + (NUM_EXPERTS + MAX_ACTIVE) * 4 : OFF_PAIRS + MAX_ACTIVE * COLUMNS * 2)
