// decode_cases.c - decodes records from a file in buffers of exactly their size, for a compiler's checks to watch.
// Input   Shape; int64 draft bytes, out bytes, cases; the draft record; for each case int64 payload bytes, the payload
// Output  a line a case: 0 or 1 as residual_decode returns, and a hash of `out`

#include <stdio.h>
#include <stdlib.h>

#include "residual_decode.c"

static void *take(FILE *file, int64_t size) {
    void *data = malloc((size_t)size);  // of size 0 too, so that any read of it is seen
    if (!data || fread(data, 1, (size_t)size, file) != (size_t)size) exit(2);
    return data;
}

int main(int argc, char **argv) {
    FILE *file = argc == 2 ? fopen(argv[1], "rb") : NULL;
    if (!file) return 2;
    Shape *shape = take(file, sizeof *shape);
    int64_t *sizes = take(file, 3 * sizeof *sizes);
    uint8_t *draft = take(file, sizes[0]);
    for (int64_t i = 0; i < sizes[2]; i++) {
        int64_t *size = take(file, sizeof *size);
        uint8_t *payload = take(file, *size), *out = calloc(1, (size_t)sizes[1]);
        int refused = 0;
        for (int64_t part = 0; part < 1 + i % 3; part++)
            refused |= residual_decode(shape, payload, *size, draft, out, part, 1 + i % 3);
        uint64_t hash = 14695981039346656037u;
        for (int64_t at = 0; at < sizes[1]; at++) hash = (hash ^ out[at]) * 1099511628211u;
        printf("%d %016llx\n", refused, (unsigned long long)hash);
        free(size), free(payload), free(out);
    }
    free(shape), free(sizes), free(draft), fclose(file);
    return 0;
}
