/* A stand-in for NVIDIA's libcuda.so.1, for tests: it knows whether it was started, as the driver does. */
#include <stdlib.h>

static int count = -1; /* read once, by cuInit */

int cuInit(unsigned flags) {
    const char *value = getenv("CUDA_VISIBLE_DEVICES");
    (void)flags;
    if (count < 0) {
        count = value == NULL ? 4 : *value != 0;
        for (; value && *value; value++) count += *value == ',';
    }
    return 0;
}

int cuDeviceGetCount(int *out) {
    if (count < 0) return 3; /* CUDA_ERROR_NOT_INITIALIZED */
    *out = count;
    return 0;
}
