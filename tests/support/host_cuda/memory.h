// Vector clocks of streams, for the device's own files.
#pragma once

#include "device.h"

#include <map>

namespace host_cuda {

using StreamKey = std::pair<int, c10::StreamId>;
using Clock = std::map<StreamKey, uint64_t>;
using Report = void (*)(const char* kind, const char* text);

StreamKey key_of(const c10::Stream& stream);
std::string name_of(const StreamKey& key);

// What a stream has seen.
Clock clock_of(const StreamKey& stream);

// What the stream does next comes after what a clock has seen.
void wait_on_stream(const StreamKey& stream, const Clock& clock);

// The host knows that what a clock has seen is done, without having waited.
void host_has_seen(const Clock& clock);

// The host waits, for all streams where no clock is given; this is reported.
void wait_for(const std::string& name, const std::string& whom, const Clock* clock);

}  // namespace host_cuda
