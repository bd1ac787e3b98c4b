// SPDX-License-Identifier: Apache-2.0
#include "harness/executor_by_name.hpp"

#include <string>

#include "harness/handoff/handoff_executor.hpp"
#include "harness/handoff/local_transport.hpp"
#include "models/error.hpp"
#include "optimized/cuda_executor.hpp"
#include "reference/reference_executor.hpp"

namespace loopgauge::harness {
namespace {

TransportFactory transport_by_name(std::string_view name) {
  if (name == "host") return make_host_transport;
  if (name == "device") return make_device_transport;
  if (name == "peer") return make_peer_transport;
  throw ConfigError("transport of handoffs '" + std::string(name) + "' is not one of: host, device, peer");
}

}  // namespace

void require_executor_name(std::string_view name) {
  if (name != "reference" && name != "optimized") throw ConfigError("executor '" + std::string(name) + "' is not one of: reference, optimized");
}

void require_handoff_transport(std::string_view transport, std::string_view executor) {
  if (transport.empty()) return;
  transport_by_name(transport);
  if (executor == "reference" && transport != "host")
    throw ConfigError("transport '" + std::string(transport) + "' moves device memory, which the reference executor has none of: use host");
}

std::unique_ptr<Executor> make_executor(std::string_view name, const Checkpoint& checkpoint, std::string_view transport) {
  require_executor_name(name);
  require_handoff_transport(transport, name);
  if (name == "reference") {
    return make_handoff_executor([&checkpoint] { return reference::make_reference_executor(checkpoint); }, make_host_transport);
  }
  const TransportFactory factory = transport_by_name(transport.empty() ? "device" : transport);
  const auto on_device = [&checkpoint](int device) -> ExecutorFactory {
    return [&checkpoint, device]() -> std::unique_ptr<Executor> { return optimized::make_cuda_executor(checkpoint, {.device = device}); };
  };
  return make_handoff_executor(on_device(0), on_device(transport == "peer" ? 1 : 0), factory);
}

}  // namespace loopgauge::harness
