// SPDX-License-Identifier: Apache-2.0
#include "optimized/cuda_executor.hpp"

#include <functional>
#include <optional>
#include <string_view>
#include <utility>

#include "models/error.hpp"
#include "models/sha256.hpp"
#include "optimized/bench/random_weights.hpp"
#include "optimized/cuda_run.hpp"
#include "optimized/ops/rope.cuh"
#include "optimized/runtime/device_guard.hpp"

namespace loopgauge::optimized {
namespace {

constexpr std::string_view kRequiredCapability = "9.0";  // warpgroup products are in no other

std::string version_text(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

class Runtime final : public CudaExecutor {
 public:
  Runtime(const CudaExecutorOptions& options, std::string sha256, const std::function<DeviceWeights(DeviceAllocator&)>& make_weights)
      : options_(options),
        allocator_({.limit_bytes = options.memory_limit_bytes, .poison = options.poison, .stream_ordered = true}),
        sha256_(std::move(sha256)),
        weights_(make_weights(allocator_)) {
    extend_rope_table(weights_.config.max_positions);
  }
  ~Runtime() override {
    const DeviceGuard guard(options_.device);
    run_.reset();
  }

  std::string name() const override { return "optimized"; }
  MemoryUsage memory_usage() const override { return allocator_.usage(); }

  void begin(const Trace& trace, const EffectiveConfig& config, const RunOptions& options) override {
    const DeviceGuard guard(options_.device);
    run_.reset();
    if (options.profile != Profile::declared) {
      throw UnsupportedError("the CUDA runtime runs profile declared only, not " + std::string(to_string(options.profile)));
    }
    if (config.exit().mode == ExitMode::trace) {
      for (std::size_t i = 0; i < trace.requests.size(); ++i) {
        if (trace.requests[i].exit_depths.size() < static_cast<std::size_t>(trace.requests[i].max_new_tokens)) {
          throw ConfigError("exit mode trace needs exit_depths for every new token; trace " + trace.name + " has none for request " + std::to_string(i));
        }
      }
    }
    extend_rope_table(longest_sequence(trace));
    allocator_.reset_peak();
    RunContext context;
    context.weights = &weights_;
    context.rope = &rope_;
    context.library = &library_;
    context.linear = options_.linear;
    context.allocator = &allocator_;
    context.stream = &allocator_.stream();
    context.arenas = &arenas_;
    context.model_sha256 = sha256_;
    context.prefill_step_rows = options_.prefill_step_rows;
    context.poison = options_.poison;
    context.device = options_.device;
    run_.emplace(context, trace, config, options);
  }

  void submit(const Submission& submission) override {
    const DeviceGuard guard(options_.device);
    run().submit(submission);
  }
  handoff::Source* handoff_source() override { return run_ ? run_->handoff_source() : nullptr; }
  handoff::Target* handoff_target() override { return run_ ? run_->handoff_target() : nullptr; }

  RunRecord finish() override {
    const DeviceGuard guard(options_.device);
    RunRecord record = run().finish();
    record.model_sha256 = sha256_;
    run_.reset();
    return record;
  }

 private:
  CudaRun& run() {
    if (!run_) throw InternalError("submit() or finish() before begin()");
    return *run_;
  }

  void extend_rope_table(int positions) {
    if (positions <= rope_.positions) return;
    const RopeTable table = make_rope_table(positions, weights_.config.head_dim, weights_.config.rope_theta);
    const std::size_t bytes = table.cosine.size() * sizeof(std::uint16_t);
    rope_ = {};
    DeviceRopeTable fresh{allocator_.allocate(MemoryCategory::weights, bytes), allocator_.allocate(MemoryCategory::weights, bytes), positions};
    const Stream& stream = allocator_.stream();
    LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(fresh.cosine.data(), table.cosine.data(), bytes, cudaMemcpyHostToDevice, stream));
    LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(fresh.sine.data(), table.sine.data(), bytes, cudaMemcpyHostToDevice, stream));
    stream.synchronize();  // the host's table ends here
    rope_ = std::move(fresh);
  }

  const CudaExecutorOptions options_;
  DeviceAllocator allocator_;
  std::string sha256_;
  DeviceWeights weights_;
  DeviceRopeTable rope_;
  CublasLt library_;
  std::vector<PinnedArena> arenas_;
  std::optional<CudaRun> run_;
};

}  // namespace

DeviceStatus device_status() {
  DeviceStatus status{true, false, ""};
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted != cudaSuccess || count == 0) {
    cudaGetLastError();  // an absent device is an answer, not an error of the next call
    status.description = "no CUDA device";
    int driver = 0;  // stays 0 where no driver is installed, which the runtime reports as an insufficient one
    const bool plain = counted == cudaSuccess || counted == cudaErrorNoDevice || (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0);
    if (!plain) status.description += std::string(" (") + cudaGetErrorString(counted) + ")";
    return status;
  }
  cudaDeviceProp properties{};
  int device = 0, driver = 0, runtime = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(&properties, device) != cudaSuccess ||
      cudaDriverGetVersion(&driver) != cudaSuccess || cudaRuntimeGetVersion(&runtime) != cudaSuccess) {
    status.description = std::string("the CUDA device does not answer (") + cudaGetErrorString(cudaGetLastError()) + ")";
    return status;
  }
  const std::string capability = std::to_string(properties.major) + "." + std::to_string(properties.minor);
  status.description = std::string(properties.name) + ", compute capability " + capability + ", driver supports CUDA " + version_text(driver) +
                       ", runtime CUDA " + version_text(runtime);
  if (capability != kRequiredCapability) {
    status.description += ": this binary needs compute capability " + std::string(kRequiredCapability);
    return status;
  }
  status.available = true;
  return status;
}

namespace {

// Refuses options that no runtime here can have.
void require_device(const CudaExecutorOptions& options) {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0 && (options.device < 0 || options.device >= count)) {
    throw UnsupportedError("the CUDA runtime cannot run: there is no device " + std::to_string(options.device) + ", " + std::to_string(count) +
                           (count == 1 ? " device is" : " devices are") + " present, counted from 0");
  }
  std::optional<DeviceGuard> guard;
  if (count > 0) guard.emplace(options.device);
  const DeviceStatus status = device_status();
  if (!status.available) throw UnsupportedError("the CUDA runtime cannot run: " + status.description);
}

}  // namespace

DeviceMemory device_memory(int device) {
  require_device({.device = device});
  const DeviceGuard guard(device);
  DeviceMemory memory;
  LOOPGAUGE_CUDA_CHECK(cudaMemGetInfo(&memory.free, &memory.total));
  memory.free += kept_bytes(device);
  return memory;
}

std::unique_ptr<CudaExecutor> make_cuda_executor(const Checkpoint& checkpoint, const CudaExecutorOptions& options) {
  require_device(options);
  const DeviceGuard guard(options.device);
  return std::make_unique<Runtime>(options, checkpoint.sha256, [&](DeviceAllocator& allocator) { return upload_weights(checkpoint, allocator); });
}

std::unique_ptr<CudaExecutor> make_random_cuda_executor(const ModelConfig& shape, std::uint32_t seed, const CudaExecutorOptions& options) {
  require_device(options);
  const DeviceGuard guard(options.device);
  Sha256 identity;
  for (const int extent : {shape.layers, shape.hidden, shape.heads, shape.head_dim, shape.intermediate, shape.vocab}) identity.update(&extent, sizeof extent);
  identity.update(&seed, sizeof seed);
  return std::make_unique<Runtime>(options, identity.hex_digest(), [&](DeviceAllocator& allocator) { return random_weights(shape, allocator, seed, allocator.stream()); });
}

}  // namespace loopgauge::optimized
