/* A stand-in for NVIDIA's libcuda.so.1, for tests: it knows whether it was started, as the driver does.
 * STAND_IN_CUDA="UUID BYTES;UUID BYTES" (without GPU- or MIG-) are its devices, in its order. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int count = -1; /* read once, by cuInit */

int cuInit(unsigned flags) {
    const char *value = getenv("CUDA_VISIBLE_DEVICES");
    (void)flags;
    if (count < 0) {
        count = value == NULL ? 4 : *value != 0;
        for (; value && *value; value++) count += *value == ',';
        value = getenv("STAND_IN_CUDA");
        for (count = value ? 1 : count; value && *value; value++) count += *value == ';';
    }
    return 0;
}

int cuDeviceGetCount(int *out) {
    if (count < 0) return 3; /* CUDA_ERROR_NOT_INITIALIZED */
    *out = count;
    return 0;
}

int cuDeviceGet(int *device, int number) {
    *device = number;
    return number < count ? 0 : 101; /* CUDA_ERROR_INVALID_DEVICE */
}

static const char *entry(int device) {
    const char *value = getenv("STAND_IN_CUDA");
    for (; value && device > 0; device--) value = strchr(value, ';') ? strchr(value, ';') + 1 : NULL;
    return value;
}

int cuDeviceGetUuid_v2(unsigned char *out, int device) {
    const char *text = entry(device);
    for (int i = 0; text && i < 16; i++) {
        unsigned byte;
        text += *text == '-';
        if (sscanf(text, "%2x", &byte) != 1) return 1;
        out[i] = (unsigned char)byte;
        text += 2;
    }
    return text ? 0 : 101;
}

int cuDeviceTotalMem_v2(size_t *out, int device) {
    const char *text = entry(device);
    if (!text || !strchr(text, ' ')) return 101;
    *out = (size_t)strtoull(strchr(text, ' '), NULL, 10);
    return 0;
}
