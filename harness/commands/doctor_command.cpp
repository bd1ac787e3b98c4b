// SPDX-License-Identifier: Apache-2.0
// `loopgauge doctor`: everything a run depends on, checked before it is needed. Lists every fault, not only the first.
#include <H5public.h>
#include <omp.h>

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "harness/case.hpp"
#include "harness/commands/command.hpp"
#include "harness/commands/common_options.hpp"
#include "harness/executor_by_name.hpp"
#include "harness/floating_point.hpp"
#include "harness/io/data_paths.hpp"
#include "harness/io/trace_file.hpp"
#include "harness/provenance.hpp"
#include "models/checkpoint.hpp"
#include "models/checkpoint_layout.hpp"
#include "models/error.hpp"
#include "optimized/cuda_executor.hpp"

namespace loopgauge::harness {
namespace {

namespace fs = std::filesystem;

constexpr int kUsageExit = 2, kInputExit = 3, kUnsupportedExit = 4;

enum class Status { ok, note, not_available, fault };

std::string_view to_string(Status status) {
  switch (status) {
    case Status::ok:
      return "ok";
    case Status::note:
      return "note";
    case Status::not_available:
      return "not available";
    case Status::fault:
      return "fault";
  }
  return "fault";
}

struct Finding {
  std::string area;
  Status status = Status::ok;
  std::string message;
};

class Examination {
 public:
  void add(std::string area, Status status, std::string message) { findings_.push_back({std::move(area), status, std::move(message)}); }

  void fault(const std::string& area, ErrorKind kind, const std::string& message) {
    add(area, Status::fault, message);
    input_ = input_ || kind == ErrorKind::input;
    usage_ = usage_ || kind == ErrorKind::usage;
    unsupported_ = unsupported_ || kind == ErrorKind::unsupported;
  }

  // Runs a step; an Error becomes a fault of `area`.
  template <class Step>
  bool attempt(const std::string& area, const Step& step) {
    try {
      step();
      return true;
    } catch (const Error& error) {
      fault(area, error.kind(), error.what());
      return false;
    }
  }

  // Input comes first: what is wrong with files often makes the rest look wrong.
  int exit_code() const {
    if (input_) return kInputExit;
    if (usage_) return kUsageExit;
    return unsupported_ ? kUnsupportedExit : 0;
  }

  void print(std::string_view output) const {
    std::size_t faults = 0;
    for (const Finding& finding : findings_) faults += finding.status == Status::fault ? 1 : 0;
    if (output == "json") {
      nlohmann::ordered_json list = nlohmann::ordered_json::array();
      for (const Finding& finding : findings_) {
        list.push_back({{"area", finding.area}, {"status", to_string(finding.status)}, {"message", finding.message}});
      }
      std::cout << nlohmann::ordered_json{{"findings", list}, {"faults", faults}}.dump(2) << "\n";
      return;
    }
    constexpr std::size_t kAreaWidth = 16;
    for (const Finding& finding : findings_) {
      std::cout << finding.area << std::string(kAreaWidth - std::min(kAreaWidth - 1, finding.area.size()), ' ') << to_string(finding.status)
                << ": " << finding.message << "\n";
    }
    std::cout << (faults == 0 ? "no faults" : std::to_string(faults) + (faults == 1 ? " fault" : " faults")) << "\n";
  }

 private:
  std::vector<Finding> findings_;
  bool input_ = false, usage_ = false, unsupported_ = false;
};

struct DoctorOptions {
  explicit DoctorOptions(CLI::App& command) : settings(command, {SettingGroup::mode, SettingGroup::algorithm, SettingGroup::execution}) {}
  SettingOptions settings;
  std::vector<std::string> traces;
  std::string output = "console";
};

// The model's configuration when the whole checkpoint is good.
std::optional<ModelConfig> examine_checkpoint(Examination& examination, const fs::path& folder) {
  const std::string area = "checkpoint";
  std::vector<std::string> faults;
  Checkpoint checkpoint;
  if (!examination.attempt(area, [&] { checkpoint = load_checkpoint(folder, faults); })) return std::nullopt;
  for (const std::string& fault : faults) examination.fault(area, ErrorKind::input, fault);
  for (const std::string& note : checkpoint.notes) examination.add(area, Status::note, note);
  if (!faults.empty()) return std::nullopt;
  const ModelConfig& config = checkpoint.config;
  examination.add(area, Status::ok,
                  folder.string() + ", " + std::to_string(config.layers) + " layers x " + std::to_string(config.loops) + " loops, " +
                      std::to_string(parameter_count(config)) + " parameters, sha256 " + checkpoint.sha256);
  if (config.loops != kLoops) {
    examination.add(area, Status::note,
                    "the model has " + std::to_string(config.loops) + " loops; FlashLoop's features are defined for exactly four");
  }
  return config;
}

void examine_configuration(Examination& examination, const Settings& settings, const std::optional<ModelConfig>& model) {
  const std::string area = "configuration";
  bool good = examination.attempt(area, [&] { require_executor_name(settings.executor); });
  if (model) good &= examination.attempt(area, [&] { EffectiveConfig::resolve(settings.config, *model); });
  if (const auto reason = case_refusal({settings.mode, settings.config, "trace"})) {
    examination.fault(area, ErrorKind::usage, mode_text(settings.mode) + ": " + *reason);
    good = false;
  }
  if (!good) return;
  const std::string text = mode_text(settings.mode) + "/" + settings_text(settings.config);
  if (model) {
    examination.add(area, Status::ok, text);
  } else {
    examination.add(area, Status::note, text + " was not compared with the model, which could not be loaded");
  }
}

void examine_device(Examination& examination, const std::string& executor) {
  const optimized::DeviceStatus status = optimized::device_status();
  if (status.compiled && status.available) {
    examination.add("device", Status::ok, status.description);
  } else if (executor == "optimized") {
    examination.fault("device", ErrorKind::unsupported, "executor optimized is asked for, but: " + status.description);
  } else {
    examination.add("device", Status::not_available, status.description + "; the reference runs without it");
  }
}

void examine_libraries(Examination& examination) {
  unsigned major = 0, minor = 0, release = 0;
  H5get_libversion(&major, &minor, &release);
  const std::string hdf5 = std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(release);
  const BuildInfo& build = build_info();
  examination.add(
      "build", Status::ok,
      "loopgauge " + build.version + " (" + build.revision + "), " + build.compiler + ", " + build.build_type + ", " + build.cuda);
  examination.add("libraries", Status::ok,
                  "HDF5 " + hdf5 + ", Eigen " + std::to_string(EIGEN_WORLD_VERSION) + "." + std::to_string(EIGEN_MAJOR_VERSION) + "." +
                      std::to_string(EIGEN_MINOR_VERSION) + ", nlohmann-json " + std::to_string(NLOHMANN_JSON_VERSION_MAJOR) + "." +
                      std::to_string(NLOHMANN_JSON_VERSION_MINOR) + "." + std::to_string(NLOHMANN_JSON_VERSION_PATCH) + ", CLI11 " +
                      CLI11_VERSION + ", OpenMP with " + std::to_string(omp_get_max_threads()) + " threads");
  if (major != H5_VERS_MAJOR || minor != H5_VERS_MINOR) {
    examination.fault("libraries", ErrorKind::unsupported,
                      "built with HDF5 " + std::to_string(H5_VERS_MAJOR) + "." + std::to_string(H5_VERS_MINOR) + ", but HDF5 " + hdf5 +
                          " is loaded; rebuild, or fix the library path");
  }
}

void examine_floating_point(Examination& examination) {
  const std::vector<std::string> faults = floating_point_faults();
  for (const std::string& fault : faults) {
    examination.fault("floating point", ErrorKind::unsupported, fault + "; the reference cannot keep its bits in this build or process");
  }
  if (faults.empty()) examination.add("floating point", Status::ok, "round to nearest even, subnormals kept, no contraction");
}

void examine_trace(Examination& examination, const fs::path& file, const std::optional<ModelConfig>& model) {
  const std::string area = "trace";
  std::vector<std::string> faults;
  Trace trace;
  if (!examination.attempt(area, [&] { trace = read_trace(file, faults); })) return;
  if (faults.empty() && model) faults = trace_faults(trace, *model);
  for (const std::string& fault : faults) examination.fault(area, ErrorKind::input, file.string() + ": " + fault);
  if (!faults.empty()) return;
  examination.add(area, model ? Status::ok : Status::note,
                  file.string() + ", " + std::to_string(trace.requests.size()) + (trace.requests.size() == 1 ? " request" : " requests") +
                      (model ? "" : "; not compared with the model, which could not be loaded"));
}

int examine(CLI::App& command, const DoctorOptions& options) {
  constexpr std::array<std::string_view, 2> kOutputs{"console", "json"};
  require_output(options.output, kOutputs);
  Examination examination;
  examine_libraries(examination);
  examine_floating_point(examination);

  std::optional<Settings> settings;
  examination.attempt("configuration", [&] { settings = options.settings.resolve(); });
  // A faulty configuration does not keep the checkpoint from being examined.
  fs::path folder;
  if (settings) {
    folder = settings->checkpoint;
  } else if (const CLI::Option* given = command.get_option("--checkpoint"); given->count() > 0) {
    folder = given->as<std::string>();
  } else {
    examination.attempt("checkpoint", [&] { folder = default_checkpoint(); });
  }
  std::optional<ModelConfig> model;
  if (!folder.empty()) model = examine_checkpoint(examination, folder);
  if (settings) examine_configuration(examination, *settings, model);
  examine_device(examination, settings ? settings->executor : "reference");
  for (const std::string& trace : options.traces) examine_trace(examination, trace, model);
  examination.print(options.output);
  return examination.exit_code();
}

}  // namespace

void add_doctor_command(CLI::App& app, int& exit_code) {
  CLI::App* command =
      app.add_subcommand("doctor", "Check checkpoint, configuration, traces, device, libraries and floating point; list every fault");
  const auto options = std::make_shared<DoctorOptions>(*command);
  command->add_option("--trace", options->traces, "Trace files to check, with the model")->type_name("FILE");
  command->add_option("--output", options->output, "console, json")->type_name("FORMAT")->capture_default_str();
  command->footer(
      "A missing GPU is no fault unless --executor optimized is given.\n"
      "Exit codes: 0 no faults, 3 a faulty file, 2 a faulty configuration, 4 something this build or machine cannot do.\n"
      "Examples:\n"
      "  loopgauge doctor\n"
      "  loopgauge doctor --checkpoint ~/models/Ouro-1.4B --trace my-trace.h5\n"
      "  loopgauge doctor --config flashloop.toml --executor optimized --output json");
  command->callback([command, options, &exit_code] { exit_code = examine(*command, *options); });
}

}  // namespace loopgauge::harness
