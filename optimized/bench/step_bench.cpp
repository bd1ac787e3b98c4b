// SPDX-License-Identifier: Apache-2.0
#include "optimized/bench/step_bench.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <set>

#include "models/error.hpp"
#include "optimized/bench/device_fill.cuh"
#include "optimized/bench/random_weights.hpp"
#include "optimized/forward_pass.hpp"
#include "optimized/ops/attention_decode.cuh"
#include "optimized/ops/head_argmax.cuh"
#include "optimized/ops/reference_statistics.cuh"
#include "optimized/ops/residual_encode.cuh"
#include "optimized/ops/rope.cuh"
#include "optimized/ops/select_keys.cuh"
#include "optimized/ops/sparse_correction.cuh"
#include "optimized/step_graphs.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kWindow = 256;
constexpr int kMostDecodeRows = 64;
constexpr std::uint32_t kWeightSeed = 1000;   // K/V have others, from 1 on
constexpr int kHistoryPrompt = 8192;           // positions of the prompts whose last rows are measured over history

ModelConfig checked(const ModelConfig& shape) {
  const DeviceStatus status = device_status();
  if (!status.available) throw UnsupportedError("the device bench cannot run: " + status.description);
  return shape;
}

// Which prompt rows of a window a late loop executes in a bench: evenly spread, as many as the retention asks for.
std::vector<std::int32_t> spread_rows(int begin, int end, int retention_bp) {
  const int size = end - begin, count = budget(retention_bp, size);
  std::vector<std::int32_t> rows;
  for (int i = 0; i < count; ++i) rows.push_back(begin + static_cast<int>(static_cast<std::int64_t>(i) * size / count));
  return rows;
}

class StepBench {
 public:
  StepBench(const ModelConfig& shape, const StepBenchOptions& options, const StepBenchObserver& observer)
      : model_(checked(shape)), options_(options), observer_(observer), kv_shape_{model_.layers, model_.heads, model_.head_dim} {
    make_weights();
  }

  void run() {
    measure_ceilings();
    if (asked("linear")) {
      for (const int batch : {1, 8, kMostDecodeRows, 256, 2048}) measure_linear(batch);
    }
    std::set<int> batches;
    for (const StepShape& step : options_.steps) batches.insert(step.batch);
    if (asked("projections")) {
      for (const int batch : batches) attempt("decode step without attention, batch " + std::to_string(batch), [&] { measure_projections(batch); });
    }
    if (asked("encode")) {
      for (const int batch : batches) {
        attempt("encode, batch " + std::to_string(batch), [&] { measure_encode("encode", "t0s0q1", kGroupSize, batch); });
      }
      std::set<int> prompts;
      for (const StepShape& step : options_.steps) prompts.insert(step.context);
      for (const std::string& switches : options_.switches) {
        AlgorithmConfig config;
        apply_switches(config, switches);
        if (!config.kv_residual_quantization.enabled) continue;
        for (const int length : prompts) {
          attempt("encode " + switches + ", prompt of " + std::to_string(length), [&] { measure_encode("encode.prompt", switches, length, 1); });
        }
      }
    }
    for (const std::string& switches : options_.switches) {
      for (const auto& [context, batch] : options_.steps) {
        if (!asked("step") && !asked("attention")) continue;
        attempt("decode " + switches + ", context " + std::to_string(context) + ", batch " + std::to_string(batch),
                [&, context = context, batch = batch] { measure_decode(switches, context, batch); });
      }
    }
    if (asked("prefill")) {
      for (const int length : options_.prompts) {
        for (const std::string& switches : options_.prefill_switches) {
          for (const int batch_rows : options_.prefill_rows) {
            attempt("prefill " + switches + ", " + std::to_string(length) + " tokens, " + std::to_string(batch_rows) + " rows",
                    [&] { measure_prefill(switches, length, batch_rows); });
          }
        }
      }
    }
    if (asked("prefill_attention")) {
      for (const std::string& switches : {std::string("t0s0q0"), std::string("t0s0q1")}) {
        attempt("prefill attention " + switches, [&] {
          measure_prefill_history(switches, kHistoryPrompt, 8, kGroupSize);
          measure_prefill_history(switches, kHistoryPrompt, 1, kWindow);
        });
      }
    }
  }

 private:
  template <class Work>
  void attempt(const std::string& name, Work&& work) {
    allocator_.reset_peak();
    try {
      work();
    } catch (const DeviceMemoryError& error) {
      if (observer_.left_out) observer_.left_out(name, error.what());
    }
  }

  bool asked(const std::string& what) const { return std::find(options_.what.begin(), options_.what.end(), what) != options_.what.end(); }

  template <class Work>
  Timing timed(int repeats, Work&& work) {
    work();  // warm: modules, algorithm choices, scratch
    std::vector<double> times;
    for (int i = 0; i < repeats; ++i) {
      Event start(Event::Timing::on), stop(Event::Timing::on);
      start.record(stream_);
      work();
      stop.record(stream_);
      stop.synchronize();
      times.push_back(stop.milliseconds_since(start) * 1e3);
    }
    return timing_of(std::move(times));
  }
  // Of a work that does the same in every layer: the time of one.
  template <class Work>
  Timing timed_per_layer(Work&& work) {
    Timing timing = timed(options_.repeats, work);
    for (double* time : {&timing.median_us, &timing.minimum_us, &timing.maximum_us}) *time /= model_.layers;
    for (double& time : timing.samples_us) time /= model_.layers;
    return timing;
  }

  void add(BenchRow row) {
    if (observer_.row) observer_.row(row);
  }
  void add(const std::string& what, const std::string& setting, int context, int batch, Timing timing, double bytes, double flops,
           const std::string& implementation = {}) {
    add({what, setting, context, batch, std::move(timing), bytes, flops, implementation, std::nullopt});
  }
  // Of whole steps and prompts: with the memory that they took.
  void add_with_memory(const std::string& what, const std::string& setting, int context, int batch, Timing timing, double bytes, double flops,
                       const std::string& implementation = {}) {
    add({what, setting, context, batch, std::move(timing), bytes, flops, implementation, allocator_.usage()});
  }
  void announce(const std::string& what) const {
    if (observer_.announce) observer_.announce(what);
  }

  DeviceBuffer random(std::size_t count, float scale) {
    DeviceBuffer buffer = allocator_.allocate_array<Bfloat16>(MemoryCategory::weights, count);
    fill_random(buffer.as<Bfloat16>(), count, ++seed_, scale, stream_);
    return buffer;
  }

  void make_weights() {
    weights_ = random_weights(model_, allocator_, kWeightSeed, stream_);
    int positions = kHistoryPrompt + kWindow;
    for (const StepShape& step : options_.steps) positions = std::max(positions, step.context + kWindow);
    for (const int length : options_.prompts) positions = std::max(positions, length + kWindow);
    const RopeTable table = make_rope_table(positions, model_.head_dim, model_.rope_theta);
    const std::size_t bytes = table.cosine.size() * sizeof(std::uint16_t);
    rope_.cosine = allocator_.allocate(MemoryCategory::weights, bytes);
    rope_.sine = allocator_.allocate(MemoryCategory::weights, bytes);
    LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(rope_.cosine.data(), table.cosine.data(), bytes, cudaMemcpyHostToDevice, stream_));
    LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(rope_.sine.data(), table.sine.data(), bytes, cudaMemcpyHostToDevice, stream_));
    stream_.synchronize();
  }

  double weight_bytes_per_loop() const {
    const double hidden = model_.hidden, width = model_.projection_width(), intermediate = model_.intermediate;
    return model_.layers * 2.0 * (4 * width * hidden + 3 * intermediate * hidden);
  }

  void measure_ceilings() {
    announce("ceilings");
    const std::size_t bytes = std::size_t{4} << 30;
    DeviceBuffer data = allocator_.allocate(MemoryCategory::workspace, bytes), sum = allocator_.allocate(MemoryCategory::workspace, 4);
    fill_random(data.as<Bfloat16>(), bytes / 2, ++seed_, 1.0f, stream_);
    LOOPGAUGE_CUDA_CHECK(cudaMemsetAsync(sum.data(), 0, 4, stream_));
    const Timing read = timed(11, [&] { read_all(data.data(), bytes, sum.as<std::uint32_t>(), stream_); });
    Ceilings ceilings;
    ceilings.read_gb_per_s = static_cast<double>(bytes) / read.median_us / 1e3;
    constexpr int kEdge = 8192;
    const auto area = static_cast<std::size_t>(kEdge) * kEdge;
    const Timing product = timed(11, [&] {
      linear(library_, LinearImplementation::library, data.as<Bfloat16>(), kEdge, data.as<Bfloat16>() + area, data.as<Bfloat16>() + 2 * area, kEdge, kEdge,
             kEdge, stream_);
    });
    ceilings.bf16_tflop_per_s = 2.0 * kEdge * static_cast<double>(area) / product.median_us / 1e6;
    if (observer_.ceilings) observer_.ceilings(ceilings);
  }

  void measure_linear(int rows) {
    announce("linear, " + std::to_string(rows) + " rows");
    struct Product {
      const char* name;
      const DeviceBuffer DeviceLayerWeights::*weight;
      int in, out;
    };
    const int width = model_.projection_width();
    const Product products[] = {{"linear.qkv", &DeviceLayerWeights::qkv, model_.hidden, 3 * width},
                                {"linear.o_proj", &DeviceLayerWeights::o_proj, width, model_.hidden},
                                {"linear.gate_up", &DeviceLayerWeights::gate_up, model_.hidden, 2 * model_.intermediate},
                                {"linear.down_proj", &DeviceLayerWeights::down_proj, model_.intermediate, model_.hidden}};
    const DeviceBuffer x = random(static_cast<std::size_t>(rows) * std::max(model_.intermediate, width), 1.0f);
    DeviceBuffer y = random(static_cast<std::size_t>(rows) * 2 * model_.intermediate, 1.0f);
    for (const LinearImplementation implementation :
         {LinearImplementation::library, LinearImplementation::tensor_core_tiles, LinearImplementation::split_k}) {
      if (implementation == LinearImplementation::split_k && rows > kMostDecodeRows) continue;  // made for few
      for (const Product& product : products) {
        // All layers in turn, so that weights come from memory and not from the cache.
        const Timing timing = timed_per_layer([&] {
          for (const DeviceLayerWeights& layer : weights_.layers) {
            linear(library_, implementation, x.as<Bfloat16>(), product.in, (layer.*product.weight).as<Bfloat16>(), y.as<Bfloat16>(), rows, product.in,
                   product.out, stream_);
          }
        });
        const double elements = static_cast<double>(product.in) * product.out;
        add(product.name, "", 0, rows, timing, 2 * (elements + static_cast<double>(rows) * (product.in + product.out)), 2 * elements * rows,
            std::string(to_string(implementation)));
      }
    }
  }

  struct State {
    AlgorithmConfig config;
    std::optional<KvCache> kv;
    std::optional<ReferenceStore> references;
    std::vector<int> slots;
    int encoded = 0;                                     // frontier of every request
    std::array<double, kLoops> stream_rows{};            // rows of one request that executed each loop, current row excluded
  };

  static RowSource row_source(const QueryRow& row) {
    RowSource source;
    source.request = row.request;
    source.position = row.position;
    source.loop = row.loop;
    source.encoded_frontier = row.encoded_frontier;
    source.reference = row.reference;
    source.token = 0;
    source.origin = row.position;
    return source;
  }

  // K/V of `batch` requests with `context` positions each: random BF16 pages, encoded window by window where the setting asks for it and `encode` does.
  void fill_cache(State& state, int context, int batch, bool encode = true) {
    const bool quantized = state.config.kv_residual_quantization.enabled;
    const auto& retention = state.config.token_sparse_prefill;
    state.kv.emplace(kv_shape_, allocator_, stream_, KvCacheOptions{quantized, false});
    DeviceBuffer fault = allocator_.allocate(MemoryCategory::workspace, sizeof(std::uint64_t));
    LOOPGAUGE_CUDA_CHECK(cudaMemsetAsync(fault.data(), 0xFF, sizeof(std::uint64_t), stream_));
    GrowableBuffer tasks(allocator_, MemoryCategory::conversion_scratch);
    const int encoded_end = quantized && encode ? std::max(0, (context - kGroupSize) / kGroupSize * kGroupSize) : 0;
    for (int i = 0; i < batch; ++i) {
      const int slot = state.kv->open_request(context + kGroupSize);
      state.slots.push_back(slot);
      for (int begin = 0; begin < context; begin += kWindow) {
        const int end = std::min(begin + kWindow, context);
        for (int loop = 1; loop <= kLoops; ++loop) {
          const auto rows = spread_rows(begin, end, retention.enabled ? retention.retention_bp[static_cast<std::size_t>(loop - 1)] : kBasisPoints);
          state.kv->reserve(slot, loop, rows);
          state.kv->set_active(slot, loop, rows);
          if (i == 0) state.stream_rows[static_cast<std::size_t>(loop - 1)] += static_cast<double>(rows.size());
          for (int page = begin / kPageTokens; page < page_count(end); ++page) {
            auto* data = reinterpret_cast<Bfloat16*>(state.kv->pages(slot)[static_cast<std::size_t>(page)].bf16[loop - 1]);
            if (data != nullptr) fill_random(data, page_bytes(kv_shape_) / 2, ++seed_, 1.0f, stream_);
          }
        }
        const PositionRange block{begin, std::min(end, encoded_end)};
        if (block.size() <= 0) continue;
        const EncodeTask task = state.kv->prepare_encode(slot, block, 1, kLoops);
        state.kv->upload();
        residual_encode({state.kv->view(), tasks.upload<EncodeTask>(std::span<const EncodeTask>(&task, 1), stream_), 1, fault.as<std::uint64_t>(), Fault::none},
                        stream_);
        for (int loop = 1; loop <= kLoops; ++loop) state.kv->release_planes(slot, loop, block);
        state.encoded = block.end;
      }
      for (int loop = 1; loop <= kLoops; ++loop) {
        state.kv->reserve(slot, loop, {context, context + 1});
        state.kv->set_active(slot, loop, {context, context + 1});
      }
    }
    state.kv->upload();
    stream_.synchronize();
  }

  double head_bytes() const { return 2.0 * model_.vocab * model_.hidden; }
  // K and V of one position, head and stream with their parameters.
  double packed_row_bytes() const {
    const double payload = model_.head_dim / 2.0, v_parameters = model_.head_dim / 64 * 4.0, k_parameters = model_.head_dim * 4.0 / 64;
    return 2 * payload + v_parameters + k_parameters;
  }

  // Bytes of K and V that a query at `loop` must read of one request in one layer.
  double kv_bytes(const State& state, int loop, int context) const {
    const double heads = model_.heads, row = 2.0 * model_.head_dim;  // BF16 bytes of one row
    const bool sparse = state.config.sparse_decode_attention.enabled && loop >= 3;
    const double share = sparse ? state.config.sparse_decode_attention.key_fraction_bp / 10000.0 : 1.0;
    double bytes = 2 * heads * row * (context + 1 - state.encoded);
    for (int stream = 1; stream <= loop && state.encoded > 0; ++stream) {
      const double rows = state.stream_rows[static_cast<std::size_t>(stream - 1)] * state.encoded / context;
      bytes += heads * rows * packed_row_bytes();
    }
    return share * bytes;
  }

  void measure_decode(const std::string& switches, int context, int batch) {
    const std::string name = switches + ", context " + std::to_string(context) + ", batch " + std::to_string(batch);
    announce("decode " + name);
    State state;
    apply_switches(state.config, switches);
    fill_cache(state, context, batch);
    const bool sparse = state.config.sparse_decode_attention.enabled;
    if (sparse) state.references.emplace(kv_shape_, batch, context + kGroupSize, allocator_);

    if (asked("step")) measure_step(state, switches, context, batch);
    if (asked("attention")) measure_attention(state, switches, context, batch);
  }

  // A whole decode step of `batch` rows as one piece of work that can be captured: every loop, then the head.
  struct DecodeStep {
    std::optional<ForwardPass> forward;
    std::array<RowBatch, kLoops> batches;
    DeviceBuffer fault, choices, exits;
    PinnedArena arena;
  };
  void prepare_step(DecodeStep& step, const State& state, int context, int batch) {
    const bool sparse = state.config.sparse_decode_attention.enabled;
    ForwardContext context_of_run;
    context_of_run.weights = &weights_;
    context_of_run.rope = &rope_;
    context_of_run.library = &library_;
    context_of_run.linear = options_.linear;
    context_of_run.allocator = &allocator_;
    context_of_run.stream = stream_;
    context_of_run.sparse_decode = sparse;
    context_of_run.key_fraction_bp = state.config.sparse_decode_attention.key_fraction_bp;
    context_of_run.max_positions = context + kGroupSize;
    step.forward.emplace(context_of_run);
    step.fault = allocator_.allocate(MemoryCategory::workspace, sizeof(std::uint64_t));
    LOOPGAUGE_CUDA_CHECK(cudaMemsetAsync(step.fault.data(), 0xFF, sizeof(std::uint64_t), stream_));
    step.choices = allocator_.allocate_array<HeadChoice>(MemoryCategory::workspace, static_cast<std::size_t>(batch));
    step.exits = allocator_.allocate_array<ExitState>(MemoryCategory::workspace, kMaxRequests);
    for (int loop = 1; loop <= kLoops; ++loop) {
      RowBatch& rows = step.batches[static_cast<std::size_t>(loop - 1)];
      rows.decode_rows = batch;
      rows.forced_keys.assign(static_cast<std::size_t>(batch), nullptr);
      for (int i = 0; i < batch; ++i)
        rows.rows.push_back(row_source({state.slots[static_cast<std::size_t>(i)], context, loop, state.encoded, sparse ? i : -1}));
    }
  }
  void issue_head(DecodeStep& step, int batch) {
    head_argmax(step.forward->logits(step.forward->output(), batch), step.choices.as<HeadChoice>(), batch, model_.vocab, stream_);
  }
  void issue_step(DecodeStep& step, State& state, int batch) {
    const auto row_bytes = static_cast<std::size_t>(batch) * model_.hidden * sizeof(Bfloat16);
    step.arena.reset();  // every repetition stages the same bytes in the same places
    for (const RowBatch& rows : step.batches) {
      Bfloat16* input = step.forward->input(batch);
      step.forward->stage(rows, step.arena);
      step.forward->prepare(rows, *state.kv, step.exits.as<ExitState>(), nullptr);
      if (&rows == &step.batches.front()) fill_random(input, static_cast<std::size_t>(batch) * model_.hidden, 7, 1.0f, stream_);
      else LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(input, step.forward->output(), row_bytes, cudaMemcpyDeviceToDevice, stream_));
      step.forward->run(rows, *state.kv, state.references ? &*state.references : nullptr, step.fault.as<std::uint64_t>(), nullptr);
    }
    issue_head(step, batch);
  }

  void measure_step(State& state, const std::string& switches, int context, int batch) {
    DecodeStep step;
    prepare_step(step, state, context, batch);
    const auto issue = [&] { issue_step(step, state, batch); };
    issue();  // makes every allocation
    const CapturedStep captured(stream_, issue);
    const Timing timing = timed(options_.repeats, [&] { captured.replay(stream_); });
    const Timing launched = timed(options_.repeats, issue);
    double bytes = kLoops * weight_bytes_per_loop() + head_bytes();
    for (int loop = 1; loop <= kLoops; ++loop) bytes += batch * model_.layers * kv_bytes(state, loop, context);
    add_with_memory("decode step", switches, context, batch, timing, bytes, 0, "captured graph");
    add("decode step, launched", switches, context, batch, launched, bytes, 0, "launches");
  }

  // The same step with rows that are padding to every attention and to the append of K and V, and its head alone, captured.
  void measure_projections(int batch) {
    announce("decode step without attention, batch " + std::to_string(batch));
    State state;
    fill_cache(state, kGroupSize, batch);
    DecodeStep step;
    prepare_step(step, state, kGroupSize, batch);
    const auto issue = [&] { issue_step(step, state, batch); };
    issue();  // with attention, whose rows the products then go on working on
    for (RowBatch& rows : step.batches) {
      for (RowSource& row : rows.rows) row.request = -1;
    }
    issue();
    const CapturedStep without_attention(stream_, issue), head(stream_, [&] { issue_head(step, batch); });
    add("decode step without attention", "", 0, batch, timed(options_.repeats, [&] { without_attention.replay(stream_); }),
        kLoops * weight_bytes_per_loop() + head_bytes(), 0, "captured graph");
    add("head", "", 0, batch, timed(options_.repeats, [&] { head.replay(stream_); }), head_bytes(), 0, "captured graph");
  }

  // Sealing `positions` positions of every request in blocks of a window: all layers and loops in one launch. A decoding request seals kGroupSize of them
  // as often as it has that many new tokens, a prompt all of its own at its end.
  void measure_encode(const std::string& what, const std::string& switches, int positions, int batch) {
    announce(what + " " + switches + ", " + std::to_string(positions) + " positions, batch " + std::to_string(batch));
    State state;
    apply_switches(state.config, switches);
    fill_cache(state, positions, batch, false);
    std::vector<EncodeTask> tasks;
    for (const int slot : state.slots) {
      const std::vector<EncodeTask> blocks = whole_blocks(*state.kv, slot, positions);
      tasks.insert(tasks.end(), blocks.begin(), blocks.end());
    }
    GrowableBuffer device_tasks(allocator_, MemoryCategory::conversion_scratch);
    DeviceBuffer fault = allocator_.allocate(MemoryCategory::workspace, sizeof(std::uint64_t));
    LOOPGAUGE_CUDA_CHECK(cudaMemsetAsync(fault.data(), 0xFF, sizeof(std::uint64_t), stream_));
    const EncodeTask* uploaded = device_tasks.upload<EncodeTask>(tasks, stream_);
    const Timing timing = timed(options_.repeats, [&] {
      residual_encode({state.kv->view(), uploaded, static_cast<int>(tasks.size()), fault.as<std::uint64_t>(), Fault::none}, stream_);
    });
    const double rows = batch * std::accumulate(state.stream_rows.begin(), state.stream_rows.end(), 0.0) * model_.layers * model_.heads;
    add(what, switches, positions, batch, timing, rows * (2.0 * 2 * model_.head_dim + packed_row_bytes()), 0);
  }

  // One layer of each kind of decode attention, layers in turn.
  void measure_attention(State& state, const std::string& switches, int context, int batch) {
    const int width = model_.projection_width();
    const DeviceBuffer q = random(static_cast<std::size_t>(batch) * width, 1.0f);
    DeviceBuffer output = random(static_cast<std::size_t>(batch) * width, 1.0f);
    GrowableBuffer workspace(allocator_, MemoryCategory::workspace), rows(allocator_, MemoryCategory::workspace), logits(allocator_, MemoryCategory::workspace);
    DeviceBuffer fault = allocator_.allocate(MemoryCategory::workspace, sizeof(std::uint64_t));
    LOOPGAUGE_CUDA_CHECK(cudaMemsetAsync(fault.data(), 0xFF, sizeof(std::uint64_t), stream_));
    const std::int64_t logit_stride = page_count(context + 1) * kPageTokens;
    const int group = reference_group_layers(kv_shape_, batch, logit_stride);
    DeviceBuffer arrivals = allocator_.allocate_array<std::uint32_t>(MemoryCategory::workspace, static_cast<std::size_t>(group) * batch * model_.heads);
    LOOPGAUGE_CUDA_CHECK(cudaMemsetAsync(arrivals.data(), 0, arrivals.size_bytes(), stream_));
    const auto per_layer = [&](auto&& work) {
      return timed_per_layer([&] {
        for (int layer = 0; layer < model_.layers; ++layer) work(layer);
      });
    };
    const auto upload_rows = [&](int loop) {
      std::vector<QueryRow> host;
      for (int i = 0; i < batch; ++i) host.push_back({state.slots[static_cast<std::size_t>(i)], context, loop, state.encoded, state.references ? i : -1});
      return rows.upload<QueryRow>(host, stream_);
    };
    for (const int loop : {1, 2, 3, 4}) {
      AttentionDecodeArguments arguments;
      arguments.kv = state.kv->view();
      arguments.q = q.as<Bfloat16>();
      arguments.q_row_stride = width;
      arguments.rows = upload_rows(loop);
      arguments.row_count = batch;
      arguments.max_length = context + 1;
      arguments.output = output.as<Bfloat16>();
      arguments.encoded_history = state.encoded > 0;
      arguments.workspace = workspace.reserve<std::byte>(attention_decode_workspace_bytes(kv_shape_, batch));
      arguments.arrivals = arrivals.as<std::uint32_t>();
      const Timing timing = per_layer([&](int layer) {
        arguments.layer = layer;
        attention_decode(arguments, stream_);
      });
      State dense = State{};
      dense.config = state.config;
      dense.config.sparse_decode_attention.enabled = false;
      dense.encoded = state.encoded;
      dense.stream_rows = state.stream_rows;
      add("attention_decode.loop" + std::to_string(loop), switches, context, batch, timing, batch * kv_bytes(dense, loop, context), 0);
    }
    if (!state.references) return;
    ReferenceStatisticsArguments arguments;
    arguments.kv = state.kv->view();
    arguments.q = q.as<Bfloat16>();
    arguments.q_row_stride = width;
    arguments.rows = upload_rows(2);
    arguments.row_count = batch;
    arguments.max_length = context + 1;
    arguments.reference = state.references->view();
    arguments.logit_stride = logit_stride;
    const std::size_t layer_logits = static_cast<std::size_t>(batch) * model_.heads * logit_stride;
    float* const group_logits = logits.reserve<float>(group * layer_logits);
    arguments.encoded_history = state.encoded > 0;
    arguments.arrivals = arrivals.as<std::uint32_t>();
    arguments.output = output.as<Bfloat16>();
    arguments.workspace = workspace.reserve<std::byte>(reference_statistics_workspace_bytes(kv_shape_, batch, group));
    arguments.numeric_fault = fault.as<std::uint64_t>();
    SelectKeysArguments selection;
    selection.shape = kv_shape_;
    selection.rows = arguments.rows;
    selection.row_count = batch;
    selection.key_fraction_bp = state.config.sparse_decode_attention.key_fraction_bp;
    selection.logit_stride = logit_stride;
    selection.reference = arguments.reference;
    selection.numeric_fault = arguments.numeric_fault;
    add("reference_statistics", switches, context, batch, per_layer([&](int layer) {
          arguments.layer = layer;
          arguments.logits = group_logits + static_cast<std::size_t>(layer % group) * layer_logits;
          reference_statistics(arguments, stream_);
        }),
        batch * kv_bytes(state, 2, context), 0);
    // A launch a layer, as observed rows need it, then as a step launches them: for all layers whose logits rows are kept. Those are of the last group.
    for (const int together : {1, group}) {
      const std::string implementation = together == 1 ? "a launch a layer" : std::to_string(together) + " layers a launch";
      const auto in_groups = [&](auto&& work) {
        return per_layer([&](int layer) {
          if (layer % together != 0) return;
          selection.layer = arguments.layer = layer;
          selection.layer_count = arguments.layer_count = std::min(together, model_.layers - layer);
          selection.logits = arguments.logits = group_logits + static_cast<std::size_t>(layer % group) * layer_logits;
          work();
        });
      };
      add("select_keys", switches, context, batch, in_groups([&] { select_keys(selection, stream_); }), 4.0 * batch * model_.heads * (context + 1), 0,
          implementation);
      add("reference_contribution", switches, context, batch, in_groups([&] { reference_contribution(arguments, stream_); }), 0, 0, implementation);
      if (group == 1) break;
    }
    for (const int loop : {3, 4}) {
      SparseCorrectionArguments correction;
      correction.kv = state.kv->view();
      correction.q = q.as<Bfloat16>();
      correction.q_row_stride = width;
      correction.rows = upload_rows(loop);
      correction.row_count = batch;
      correction.max_length = context + 1;
      correction.reference = state.references->view();
      correction.output = output.as<Bfloat16>();
      correction.encoded_history = state.encoded > 0;
      correction.workspace = workspace.reserve<std::byte>(sparse_correction_workspace_bytes(kv_shape_, batch));
      correction.arrivals = arrivals.as<std::uint32_t>();
      add("sparse_correction.loop" + std::to_string(loop), switches, context, batch, per_layer([&](int layer) {
            correction.layer = layer;
            sparse_correction(correction, stream_);
          }),
          batch * kv_bytes(state, loop, context), 0);
    }
  }

  // The batches of one prompt, loop after loop: consecutive windows side by side as long as they have no more than `batch_rows` active rows
  // together (at least one window). Late loops run on evenly spread rows; selection itself is not part of it.
  struct Prefill {
    std::vector<RowBatch> batches;
    double product_flops = 0, attention_flops = 0;
  };
  Prefill make_prefill(KvCache& kv, int slot, const TokenSparsePrefill& retention, int length, int batch_rows) const {
    Prefill prefill;
    for (int loop = 1; loop <= kLoops; ++loop) {
      RowBatch* batch = nullptr;
      for (int begin = 0; begin < length; begin += kWindow) {
        const auto rows = spread_rows(begin, std::min(begin + kWindow, length),
                                      retention.enabled ? retention.retention_bp[static_cast<std::size_t>(loop - 1)] : kBasisPoints);
        const int count = static_cast<int>(rows.size());
        if (batch == nullptr || batch->size() + count > batch_rows) {
          batch = &prefill.batches.emplace_back();
          batch->take_scores = retention.enabled && (loop == 2 || loop == 3);
        }
        kv.reserve(slot, loop, rows);
        kv.set_active(slot, loop, rows);
        // One segment: rows of several windows of one request are rows in ascending order.
        if (batch->segments.empty()) batch->segments.push_back({slot, loop, 0, 0, 0});
        batch->segments.front().row_count += count;
        for (const std::int32_t position : rows) {
          batch->rows.push_back(row_source({slot, position, loop, 0, -1}));
          prefill.attention_flops += 4.0 * model_.layers * model_.projection_width() * (position + 1);
        }
        prefill.product_flops += weight_bytes_per_loop() * count;  // two bytes and two operations for each weight
      }
    }
    kv.upload();
    return prefill;
  }

  // The blocks, a window each, of a prompt that is encoded as a whole; kv is uploaded.
  std::vector<EncodeTask> whole_blocks(KvCache& kv, int slot, int length) const {
    std::vector<EncodeTask> tasks;
    for (int begin = 0; begin < length; begin += kWindow) tasks.push_back(kv.prepare_encode(slot, {begin, std::min(begin + kWindow, length)}, 1, kLoops));
    kv.upload();
    return tasks;
  }

  // A whole prompt, and its attention, its products and its encoding alone, in the same batches.
  void measure_prefill(const std::string& switches, int length, int batch_rows) {
    announce("prefill " + switches + ", " + std::to_string(length) + " tokens, " + std::to_string(batch_rows) + " rows");
    AlgorithmConfig config;
    apply_switches(config, switches);
    ForwardContext context;
    context.weights = &weights_;
    context.rope = &rope_;
    context.library = &library_;
    context.linear = options_.linear;
    context.allocator = &allocator_;
    context.stream = stream_;
    context.max_positions = length;
    ForwardPass forward(context);
    const bool quantized = config.kv_residual_quantization.enabled;
    KvCache kv(kv_shape_, allocator_, stream_, KvCacheOptions{quantized, false});
    const int slot = kv.open_request(length);
    const Prefill prefill = make_prefill(kv, slot, config.token_sparse_prefill, length, batch_rows);
    std::vector<EncodeTask> blocks;
    if (quantized) blocks = whole_blocks(kv, slot, length);
    GrowableBuffer tasks(allocator_, MemoryCategory::conversion_scratch);
    const EncodeTask* const uploaded = tasks.upload<EncodeTask>(blocks, stream_);
    DeviceBuffer fault = allocator_.allocate(MemoryCategory::workspace, sizeof(std::uint64_t));
    LOOPGAUGE_CUDA_CHECK(cudaMemsetAsync(fault.data(), 0xFF, sizeof(std::uint64_t), stream_));
    PinnedArena arena;
    const auto encode = [&] {
      residual_encode({kv.view(), uploaded, static_cast<int>(blocks.size()), fault.as<std::uint64_t>(), Fault::none}, stream_);
    };
    const auto record = [&](const std::string& what, double flops, auto&& work) { add(what, switches, length, batch_rows, timed(5, work), 0, flops); };
    const Timing whole = timed(5, [&] {
      arena.reset();  // every repetition stages the same bytes in the same places
      for (const RowBatch& batch : prefill.batches) {
        Bfloat16* input = forward.input(batch.size());
        forward.stage(batch, arena);
        forward.prepare(batch, kv, nullptr, nullptr);
        fill_random(input, static_cast<std::size_t>(batch.size()) * model_.hidden, 7, 1.0f, stream_);
        forward.run(batch, kv, nullptr, fault.as<std::uint64_t>(), nullptr);
      }
      encode();  // at the prompt's end, as `fixed_prompt` does (`rolling` leaves 64 to 127 positions for later)
    });
    add_with_memory("prefill", switches, length, batch_rows, whole, 0, prefill.product_flops + prefill.attention_flops);

    const auto most_rows = static_cast<std::size_t>(
        std::max_element(prefill.batches.begin(), prefill.batches.end(), [](const RowBatch& a, const RowBatch& b) { return a.size() < b.size(); })->size());
    const int width = model_.projection_width();
    const DeviceBuffer x = random(most_rows * static_cast<std::size_t>(std::max(model_.intermediate, 3 * width)), 1.0f);
    DeviceBuffer y = random(most_rows * 2 * static_cast<std::size_t>(std::max(model_.intermediate, 2 * width)), 1.0f);
    std::vector<AttentionPrefillArguments> attention;
    std::vector<GrowableBuffer> tables;
    for (const RowBatch& batch : prefill.batches) {
      std::vector<std::int32_t> positions;
      for (const RowSource& row : batch.rows) positions.push_back(row.position);
      const std::vector<PrefillTile> tiles = make_prefill_tiles(batch.segments, model_.heads);
      AttentionPrefillArguments& arguments = attention.emplace_back();
      arguments.kv = kv.view();
      arguments.q = x.as<Bfloat16>();
      arguments.q_row_stride = 3 * static_cast<std::int64_t>(width);
      arguments.positions = tables.emplace_back(allocator_, MemoryCategory::workspace).upload<std::int32_t>(positions, stream_);
      arguments.tiles = tables.emplace_back(allocator_, MemoryCategory::workspace).upload<PrefillTile>(tiles, stream_);
      arguments.tile_count = static_cast<int>(tiles.size());
      arguments.encoded_history = false;
      arguments.output = y.as<Bfloat16>();
    }
    record("prefill.attention", prefill.attention_flops, [&] {
      for (AttentionPrefillArguments& arguments : attention) {
        for (arguments.layer = 0; arguments.layer < model_.layers; ++arguments.layer) attention_prefill(arguments, stream_);
      }
    });
    record("prefill.products", prefill.product_flops, [&] {
      for (const RowBatch& batch : prefill.batches) {
        for (const DeviceLayerWeights& layer : weights_.layers) {
          const auto product = [&](const DeviceBuffer& weight, int in, int out) {
            linear(library_, options_.linear, x.as<Bfloat16>(), in, weight.as<Bfloat16>(), y.as<Bfloat16>(), batch.size(), in, out, stream_);
          };
          product(layer.qkv, model_.hidden, 3 * width);
          product(layer.o_proj, width, model_.hidden);
          product(layer.gate_up, model_.hidden, 2 * model_.intermediate);
          product(layer.down_proj, model_.intermediate, model_.hidden);
        }
      }
    });
    if (quantized) record("prefill.encode", 0, encode);
  }

  // Attention of the last rows of prompts whose history is encoded but for the last kGroupSize positions, beside the same rows over BF16, layers in turn.
  void measure_prefill_history(const std::string& switches, int length, int requests, int last_rows) {
    announce("prefill attention " + switches + ", " + std::to_string(requests) + " x the last " + std::to_string(last_rows) + " rows");
    State state;
    apply_switches(state.config, switches);
    fill_cache(state, length, requests);
    const int rows = requests * last_rows, width = model_.projection_width();
    const DeviceBuffer q = random(static_cast<std::size_t>(rows) * width, 1.0f);
    DeviceBuffer output = random(static_cast<std::size_t>(rows) * width, 1.0f);
    GrowableBuffer position_table(allocator_, MemoryCategory::workspace), tile_table(allocator_, MemoryCategory::workspace),
        workspace(allocator_, MemoryCategory::workspace);
    std::vector<std::int32_t> positions;
    double flops = 0;
    for (int i = 0; i < rows; ++i) {
      positions.push_back(length - last_rows + i % last_rows);
      flops += 4.0 * width * (positions.back() + 1);
    }
    for (const int loop : {1, 2, 4}) {
      std::vector<PrefillSegment> segments;
      for (int i = 0; i < requests; ++i) segments.push_back({state.slots[static_cast<std::size_t>(i)], loop, state.encoded, i * last_rows, last_rows});
      const std::vector<PrefillTile> tiles = make_prefill_tiles(segments, model_.heads);
      AttentionPrefillArguments arguments;
      arguments.kv = state.kv->view();
      arguments.q = q.as<Bfloat16>();
      arguments.q_row_stride = width;
      arguments.positions = position_table.upload<std::int32_t>(positions, stream_);
      arguments.tiles = tile_table.upload<PrefillTile>(tiles, stream_);
      arguments.tile_count = static_cast<int>(tiles.size());
      arguments.encoded_history = state.encoded > 0;
      arguments.row_count = rows;
      arguments.max_length = length;
      arguments.workspace = workspace.reserve<std::byte>(attention_prefill_workspace_bytes(kv_shape_, rows, length));
      arguments.output = output.as<Bfloat16>();
      const Timing timing = timed_per_layer([&] {
        for (arguments.layer = 0; arguments.layer < model_.layers; ++arguments.layer) attention_prefill(arguments, stream_);
      });
      add("attention_prefill.loop" + std::to_string(loop), switches, length, rows, timing, 0, flops);
    }
  }

  const ModelConfig model_;
  const StepBenchOptions options_;
  const StepBenchObserver observer_;
  const KvShape kv_shape_;
  DeviceAllocator allocator_{{.stream_ordered = true}};  // pages come and go by thousands
  const Stream& stream_ = allocator_.stream();
  CublasLt library_;
  DeviceWeights weights_;
  DeviceRopeTable rope_;
  std::uint32_t seed_ = 0;
};

}  // namespace

void run_step_bench(const ModelConfig& shape, const StepBenchOptions& options, const StepBenchObserver& observer) {
  StepBench(shape, options, observer).run();
}

}  // namespace loopgauge::optimized
