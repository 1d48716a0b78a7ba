// All of the device as one unit: torch's headers are read once, which takes most of the time.
#include "memory.cpp"
#include "device.cpp"
#include "exchanges.cpp"
#include "fallback.cpp"
