// Whether the compiler works.
#define ELEMENT 0
#define WATCHDOG 1
#include "primitives.cuh"

extern "C" __global__ void probe() {}
