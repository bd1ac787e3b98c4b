// SPDX-License-Identifier: Apache-2.0
// Both sides in one process and in host memory: a write is a copy, which has ended when it returns.
#pragma once

#include "models/handoff/transfer.hpp"

namespace loopgauge::harness {

handoff::TransportEnds make_host_transport();

}  // namespace loopgauge::harness
