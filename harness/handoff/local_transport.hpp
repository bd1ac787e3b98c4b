// SPDX-License-Identifier: Apache-2.0
// Both sides in one process, in one thread or each in its own.
#pragma once

#include "models/handoff/transfer.hpp"

namespace loopgauge::harness {

// Regions in host memory: a write is a copy, which has ended when it returns. "host".
handoff::TransportEnds make_host_transport();
// Regions in device memory, on one GPU or on two: writes are copies that the host does not wait for. "device", "peer".
// Throws UnsupportedError in a build without CUDA.
handoff::TransportEnds make_device_transport();
handoff::TransportEnds make_peer_transport();

}  // namespace loopgauge::harness
