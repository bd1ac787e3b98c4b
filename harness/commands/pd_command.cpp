// SPDX-License-Identifier: Apache-2.0
// `loopgauge pd`: handoffs between processes. send computes prompts and hands them to a process that serves, which decodes; export computes prompts and
// writes what would have been sent to a file, import decodes from such a file, info says what is in one, compare sets two against each other region by
// region.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "harness/byte_text.hpp"
#include "harness/commands/case_selection.hpp"
#include "harness/commands/command.hpp"
#include "harness/commands/common_options.hpp"
#include "harness/commands/handoff_json.hpp"
#include "harness/commands/option_checks.hpp"
#include "harness/executor_by_name.hpp"
#include "harness/handoff/archive.hpp"
#include "harness/handoff/handoff_executor.hpp"
#include "harness/handoff/local_transport.hpp"
#include "harness/handoff/side_runs.hpp"
#include "harness/handoff/socket_transport.hpp"
#include "harness/identity_hash.hpp"
#include "harness/io/atomic_output.hpp"
#include "harness/io/digest.hpp"
#include "harness/io/dump_file.hpp"
#include "harness/io/replaceable.hpp"
#include "harness/io/trace_file.hpp"
#include "harness/planner/planner.hpp"
#include "harness/provenance.hpp"
#include "harness/replay.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kDifferentExit = 1;

void add_output_option(CLI::App& command, std::string& output) {
  command.add_option("--output", output, "console, json")->type_name("FORMAT")->capture_default_str();
}

// Before any work.
bool as_json(const std::string& output) {
  constexpr std::array<std::string_view, 2> kOutputs{"console", "json"};
  require_output(output, kOutputs);
  return output == "json";
}

struct PdOptions {
  explicit PdOptions(CLI::App& command) : settings(command, {SettingGroup::execution}) {}
  SettingOptions settings;
  std::string case_text, trace_file, archive_file, dump_file, socket, memory, output = "console";
  double lease = 60.0;  // seconds
  std::uint64_t bytes_in_flight = HandoffLimits{}.bytes_in_flight;
  bool force = false, digest = false;
};

struct Subject {
  Case value;
  Trace trace;
  Checkpoint checkpoint;
  Settings settings;
};

// The case as one of handoffs: a mode without pd gets it.
Subject read_subject(const PdOptions& options) {
  Subject subject;
  subject.settings = options.settings.resolve();
  subject.value = parse_case_id(options.case_text);
  subject.value.mode.pd = true;
  require_runnable(subject.value);
  subject.trace = read_trace(options.trace_file.empty() ? trace_path(subject.value.trace) : std::filesystem::path(options.trace_file));
  if (subject.value.trace != subject.trace.name) {
    throw ConfigError("the case names trace '" + subject.value.trace + "', but the file holds trace '" + subject.trace.name + "'");
  }
  subject.checkpoint = load_checkpoint(subject.settings.checkpoint);
  if (const auto faults = trace_faults(subject.trace, subject.checkpoint.config); !faults.empty()) {
    throw TraceError("trace " + subject.trace.name + " does not fit the model: " + faults[0]);
  }
  return subject;
}

Plan plan_of(const Subject& subject) {
  return make_plan(subject.value.mode, subject.trace, EffectiveConfig::resolve(subject.value.config, subject.checkpoint.config));
}

// Of a side that decodes: of the prompt's rows nothing was observed here.
RecordGroups decoded_groups() {
  RecordGroups groups = RecordGroups::all();
  groups.hidden = groups.gate = false;
  return groups;
}

// Digests of what both a run without a handoff and a side that decodes have.
std::map<std::string, std::string> decoded_digests(const RunRecord& record) {
  constexpr std::array<std::string_view, 8> kOfBothSides{"tokens", "logits", "exits", "keys", "mass", "kv", "codec", "encoded_frontier"};
  const auto all = digests(record);
  std::map<std::string, std::string> chosen;
  for (const std::string_view name : kOfBothSides) chosen[std::string(name)] = all.at(std::string(name));
  return chosen;
}

void print_decoded_json(const Subject& subject, const RunRecord& record, const std::string& from, bool digest, const std::string& dump_file) {
  Json json{{"case", case_id(subject.value)}, {"from", from}, {"executor", record.executor}, {"requests", Json::array()}};
  for (const RequestRecord& request : record.requests) {
    json["requests"].push_back(
        {{"prompt_length", request.prompt_length}, {"outcome", to_string(request.outcome)}, {"fed", request.fed}, {"tokens", request.tokens}});
  }
  json["held_at_drain"] = describe(record.held_at_drain);
  if (digest) json["digests"] = {{"version", kDigestVersion}, {"sha256", decoded_digests(record)}};
  if (!dump_file.empty()) json["dump"] = dump_file;
  std::cout << json.dump(2) << "\n";
}

void print_held(const RunRecord& record) {
  const std::string held = describe(record.held_at_drain);
  std::cout << "\nheld at the end: " << (held.empty() ? "nothing" : held) << "\n";
}

void print_decoded_console(const Subject& subject, const RunRecord& record, const std::string& from, bool digest) {
  std::cout << "case      " << case_id(subject.value) << "\nfrom      " << from << "\nexecutor  " << record.executor << "\n";
  for (std::size_t i = 0; i < record.requests.size(); ++i) {
    const RequestRecord& request = record.requests[i];
    std::cout << "\nrequest " << i << "  prompt " << request.prompt_length << ", " << request.tokens.size() << " tokens, " << request.fed
              << " forwarded\n  tokens  ";
    for (const std::int32_t token : request.tokens) std::cout << " " << token;
    std::cout << "\n";
  }
  print_held(record);
  if (!digest) return;
  for (const auto& [name, hash] : decoded_digests(record)) std::cout << hash << "  " << name << "\n";
}

void give_decoded(const Subject& subject, const RunRecord& record, const std::string& from, const PdOptions& options) {
  if (!options.dump_file.empty()) {
    write_dump(options.dump_file, record, EffectiveConfig::resolve(subject.value.config, subject.checkpoint.config),
               {.case_id = case_id(subject.value), .only = {}});
  }
  if (as_json(options.output)) {
    print_decoded_json(subject, record, from, options.digest, options.dump_file);
  } else {
    print_decoded_console(subject, record, from, options.digest);
  }
}

RunRecord replay_subject(Executor& executor, const Subject& subject, RecordGroups groups) {
  const EffectiveConfig config = EffectiveConfig::resolve(subject.value.config, subject.checkpoint.config);
  const Plan plan = plan_of(subject);
  RunOptions options;
  options.profile = subject.settings.profile;
  options.record = groups;
  return replay_watched(executor, plan, subject.trace, config, options, nullptr);
}

std::map<handoff::RegionKind, std::uint64_t> bytes_by_kind(const ArchivedHandoff& handoff, const std::vector<handoff::Region>& regions) {
  std::map<handoff::RegionKind, std::uint64_t> bytes;
  for (std::size_t i = 0; i < regions.size(); ++i) bytes[regions[i].kind] += handoff.summaries[i].bytes;
  return bytes;
}

std::vector<std::uint64_t> region_bytes(const ArchivedHandoff& handoff) {
  std::vector<std::uint64_t> bytes;
  for (const handoff::RegionSummary& summary : handoff.summaries) bytes.push_back(summary.bytes);
  return bytes;
}

// 16 hexadecimal digits: as a JSON number many readers would round it.
std::string checksum_text(std::uint64_t checksum) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(checksum));
  return digits;
}

void print_archive(const HandoffArchive& archive, bool all_regions) {
  std::cout << "trace     " << archive.trace << "\nproducer  " << archive.producer << "\n";
  if (archive.handoffs.empty()) std::cout << "no handoffs: no prompt was computed to its end\n";
  for (const ArchivedHandoff& handoff : archive.handoffs) {
    const handoff::Descriptor& d = handoff.descriptor;
    const std::vector<handoff::Region> regions = regions_of(d);
    const std::vector<std::uint64_t> bytes = region_bytes(handoff);
    const std::uint64_t total = std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
    std::cout << "\nrequest " << d.request << "  prompt " << d.prompt_length << ", encoded below " << d.encoded_frontier << ", "
              << regions.size() << " regions, " << total << " bytes (dense BF16 " << dense_bytes(d) << ", ratio "
              << static_cast<double>(dense_bytes(d)) / static_cast<double>(total) << "), "
              << bytes_final_after(d, regions, bytes, d.loops - 1) << " final before the last loop\n"
              << "  model     " << d.model_sha256 << "\n  prompt    " << d.prompt_sha256 << "\n  elements  " << to_string(d.element) << ", profile "
              << to_string(d.profile)
              << "\n  config    " << d.configuration << "\n";
    for (const auto& [kind, count] : bytes_by_kind(handoff, regions)) std::cout << "  " << count << "  " << to_string(kind) << "\n";
    for (std::size_t i = 0; all_regions && i < regions.size(); ++i) {
      std::cout << "  region " << i << "  " << describe(regions[i]) << "  " << bytes[i] << " bytes, checksum "
                << checksum_text(handoff.summaries[i].checksum) << "\n";
    }
  }
}

Json archive_json(const HandoffArchive& archive, bool all_regions) {
  Json json{{"trace", archive.trace}, {"producer", archive.producer}, {"handoffs", Json::array()}};
  for (const ArchivedHandoff& handoff : archive.handoffs) {
    const handoff::Descriptor& d = handoff.descriptor;
    const std::vector<handoff::Region> regions = regions_of(d);
    const std::vector<std::uint64_t> bytes = region_bytes(handoff);
    const std::uint64_t total = std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
    Json entry{{"request", d.request},
               {"prompt_length", d.prompt_length},
               {"encoded_frontier", d.encoded_frontier},
               {"bytes", total},
               {"dense_bytes", dense_bytes(d)},
               {"bytes_final_before_last_loop", bytes_final_after(d, regions, bytes, d.loops - 1)},
               {"model_sha256", d.model_sha256},
               {"prompt_sha256", d.prompt_sha256},
               {"element", to_string(d.element)},
               {"profile", to_string(d.profile)},
               {"configuration", Json::parse(d.configuration)},
               {"bytes_by_kind", Json::object()}};
    for (const auto& [kind, count] : bytes_by_kind(handoff, regions)) entry["bytes_by_kind"][std::string(to_string(kind))] = count;
    for (std::size_t i = 0; all_regions && i < regions.size(); ++i) {
      entry["regions"].push_back({{"kind", to_string(regions[i].kind)},
                                  {"begin", regions[i].positions.begin},
                                  {"end", regions[i].positions.end},
                                  {"loop", regions[i].loop},
                                  {"bytes", bytes[i]},
                                  {"checksum", checksum_text(handoff.summaries[i].checksum)}});
    }
    json["handoffs"].push_back(std::move(entry));
  }
  return json;
}

void give_archive(const HandoffArchive& archive, bool all_regions, const std::string& output) {
  if (as_json(output)) {
    std::cout << archive_json(archive, all_regions).dump(2) << "\n";
  } else {
    print_archive(archive, all_regions);
  }
}

void add_export(CLI::App& pd, int& exit_code) {
  CLI::App* command = pd.add_subcommand("export", "Compute a case's prompts and write what a handoff would send to a file");
  const auto options = std::make_shared<PdOptions>(*command);
  command->add_option("case", options->case_text, "Case id; its mode orders the prompts, pd is added where it lacks it")
      ->type_name("CASE")
      ->required();
  command->add_option("-o,--out", options->archive_file, "The file to write")->type_name("FILE")->required();
  command->add_option("--trace", options->trace_file, "Trace file, as the place of the id's trace")->type_name("FILE");
  command->add_flag("--force", options->force, "Replace an existing file of handoffs, and no other file");
  add_output_option(*command, options->output);
  command->footer("Example:\n  loopgauge pd export wcpb/t1s1q1:rolling:serial_aligned/needle-1k -o needle.handoff");
  command->callback([options, &exit_code] {
    as_json(options->output);
    if (options->force) require_replaceable_text(options->archive_file, kArchiveMagic, "-o");
    const Subject subject = read_subject(*options);
    AtomicOutput output(options->archive_file, options->force ? IfExists::replace : IfExists::refuse);
    HandoffArchive archive;
    const auto executor = make_handoff_executor([&] { return make_executor(subject.settings.executor, subject.checkpoint); },
                                                [&] { return make_archiving_executor(archive); }, make_host_transport);
    replay_subject(*executor, subject, RecordGroups{});
    archive.producer = subject.settings.executor + ", profile " + std::string(to_string(subject.settings.profile)) + ", loopgauge " +
                       build_info().version + " " + build_info().revision;
    archive.trace = subject.trace.name;
    const std::vector<std::byte> bytes = serialize(archive);
    {
      std::ofstream file(output.temporary(), std::ios::binary);
      file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
      if (!file.flush()) throw FileError(options->archive_file + ": the file could not be written to its end");
    }
    output.commit();
    give_archive(archive, false, options->output);
    exit_code = 0;
  });
}

// Of a side that decodes.
void add_result_options(CLI::App& command, PdOptions& options) {
  command.add_option("--dump", options.dump_file, "Write the run's tensors to this HDF5 file, without hidden rows and gates, which do not travel")
      ->type_name("FILE");
  command.add_flag("--digest", options.digest, "Print SHA-256 digests of the results, those of loopgauge run --digest for a run without a handoff");
}

void add_import(CLI::App& pd, int& exit_code) {
  CLI::App* command =
      pd.add_subcommand("import", "Decode a case from a file of handoffs: model, configuration and prompts must be those of the file");
  const auto options = std::make_shared<PdOptions>(*command);
  command->add_option("case", options->case_text, "Case id")->type_name("CASE")->required();
  command->add_option("file", options->archive_file, "File that pd export wrote")->type_name("FILE")->required();
  command->add_option("--trace", options->trace_file, "Trace file, as the place of the id's trace")->type_name("FILE");
  add_result_options(*command, *options);
  add_output_option(*command, options->output);
  command->footer("Example:\n  loopgauge pd import wcpb/t1s1q1:rolling:serial_aligned/needle-1k needle.handoff --digest");
  command->callback([options, &exit_code] {
    as_json(options->output);
    require_dump_replaceable(options->dump_file);
    const Subject subject = read_subject(*options);
    const HandoffArchive archive = read_archive(options->archive_file);
    const auto executor =
        make_handoff_executor([&] { return make_archived_executor(archive); },
                              [&] { return make_executor(subject.settings.executor, subject.checkpoint); }, make_host_transport);
    const RunRecord record = [&] {
      try {
        return replay_subject(*executor, subject, decoded_groups());
      } catch (const handoff::HandoffError& error) {
        throw handoff::HandoffError(options->archive_file + ": " + error.what());
      }
    }();
    give_decoded(subject, record, archive.producer, *options);
    exit_code = 0;
  });
}

// What serve and send have in common.
void add_socket_options(CLI::App& command, PdOptions& options) {
  command.add_option("case", options.case_text, "Case id; both sides must be given the same, what differs is refused by its name")->type_name("CASE")->required();
  command.add_option("--socket", options.socket, "Path of the Unix socket at which serve waits and to which send comes")->type_name("PATH")->required();
  command.add_option("--trace", options.trace_file, "Trace file, as the place of the id's trace")->type_name("FILE");
  command
      .add_option("--memory", options.memory,
                  "Where regions lie, the same at both sides: host (they go over the socket) or device (CUDA IPC). Default: where the executor computes")
      ->type_name("PLACE");
  command
      .add_option("--lease", options.lease, "Seconds without progress after which the other side is given up, also before it has come")
      ->type_name("SECONDS")
      ->check(real_number(0.01, 86400.0))
      ->capture_default_str();
  add_output_option(command, options.output);
}

RunIdentity identity_of(const Subject& subject) {
  return {mode_text(subject.value.mode), settings_text(subject.value.config), subject.value.trace, trace_sha256(subject.trace), subject.checkpoint.sha256,
          std::string(to_string(subject.settings.profile))};
}

SideOptions side_of(const PdOptions& options, const Subject& subject) {
  const std::string place = !options.memory.empty() ? options.memory : subject.settings.executor == "optimized" ? "device" : "host";
  if (place != "host" && place != "device") throw ConfigError("--memory " + place + " is not one of: host, device");
  if (place == "device" && subject.settings.executor == "reference")
    throw ConfigError("--memory device needs an executor with device memory, which the reference executor has none of; use --memory host");
  SideOptions side;
  side.place = place == "device" ? handoff::MemoryPlace::device : handoff::MemoryPlace::host;
  side.limits.lease = std::chrono::milliseconds(static_cast<std::int64_t>(options.lease * 1000));
  // Partitions and what is exported ahead keep their proportion to what is being written at once.
  side.limits.partition_bytes = options.bytes_in_flight / 4;
  side.limits.bytes_in_flight = options.bytes_in_flight;
  side.limits.export_bytes = options.bytes_in_flight * 4;
  side.identity = identity_of(subject);
  return side;
}

void add_serve(CLI::App& pd, int& exit_code) {
  CLI::App* command = pd.add_subcommand("serve", "Decode a case from what another process of this host sends (pd send)");
  const auto options = std::make_shared<PdOptions>(*command);
  add_socket_options(*command, *options);
  add_result_options(*command, *options);
  command->footer("Example, in two shells:\n"
                  "  loopgauge pd serve wcpb/t1s1q1:rolling:serial_aligned/needle-1k --socket handoff.socket --digest\n"
                  "  loopgauge pd send wcpb/t1s1q1:rolling:serial_aligned/needle-1k --socket handoff.socket\n"
                  "Exit code 3 when a request does not come, with the reason: the other side was refused, has failed, is gone or slower than the lease.");
  command->callback([options, &exit_code] {
    as_json(options->output);
    require_dump_replaceable(options->dump_file);
    const Subject subject = read_subject(*options);
    const SideOptions side = side_of(*options, subject);
    const EffectiveConfig config = EffectiveConfig::resolve(subject.value.config, subject.checkpoint.config);
    const auto executor = make_executor(subject.settings.executor, subject.checkpoint);
    const auto connection = accept_handoffs(options->socket, side.limits.lease);
    RunOptions run;
    run.profile = subject.settings.profile;
    run.record = decoded_groups();
    const RunRecord record = run_decode_side(*executor, plan_of(subject), subject.trace, config, run, connection, side);
    give_decoded(subject, record, "the process at " + options->socket, *options);
    exit_code = 0;
  });
}

void give_sent(const Subject& subject, const RunRecord& record, const std::string& output) {
  if (as_json(output)) {
    Json json{{"case", case_id(subject.value)}, {"executor", record.executor}, {"handoffs", Json::array()}};
    for (const HandoffRecord& handoff : record.handoffs) {
      json["handoffs"].push_back(handoff_json(handoff));
      json["handoffs"].back().erase("most_reserved_bytes");  // the other process knows
    }
    json["held_at_drain"] = describe(record.held_at_drain);
    std::cout << json.dump(2) << "\n";
    return;
  }
  std::cout << "case      " << case_id(subject.value) << "\nexecutor  " << record.executor << "\n";
  for (const HandoffRecord& handoff : record.handoffs) {
    std::cout << "\nrequest " << handoff.request << "  " << handoff.outcome << " over " << handoff.transport << ", " << handoff.bytes
              << " bytes (dense BF16 " << handoff.dense_bytes << "), " << handoff.bytes_before_prompt_end << " before the end of the prompt, at most "
              << handoff.most_bytes_in_flight << " in flight, " << handoff.seconds << " s after it\n";
  }
  print_held(record);
}

void add_send(CLI::App& pd, int& exit_code) {
  CLI::App* command = pd.add_subcommand("send", "Compute a case's prompts and hand them over to another process of this host (pd serve)");
  const auto options = std::make_shared<PdOptions>(*command);
  add_socket_options(*command, *options);
  command
      ->add_option("--bytes-in-flight", options->bytes_in_flight,
                   "Bytes that are being written at once at most, such as 64MB; partitions are a quarter of it (128 MiB at most), and four times as much is exported "
                   "ahead. More is faster between devices, and what both sides hold beside their caches")
      ->type_name("BYTES")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(std::uint64_t{4} << 10, std::uint64_t{1} << 32))
      ->capture_default_str();
  command->footer("Example: see pd serve.\nExit code 3 when a request is not handed over, with the reason.");
  command->callback([options, &exit_code] {
    as_json(options->output);
    const Subject subject = read_subject(*options);
    const SideOptions side = side_of(*options, subject);
    const EffectiveConfig config = EffectiveConfig::resolve(subject.value.config, subject.checkpoint.config);
    const auto executor = make_executor(subject.settings.executor, subject.checkpoint);
    const auto connection = connect_handoffs(options->socket, side.limits.lease);
    RunOptions run;
    run.profile = subject.settings.profile;
    const RunRecord record = run_prefill_side(*executor, plan_of(subject), subject.trace, config, run, connection, side);
    give_sent(subject, record, options->output);
    exit_code = 0;
  });
}

void add_info(CLI::App& pd, int& exit_code) {
  CLI::App* command = pd.add_subcommand("info", "What a file of handoffs holds; reading it checks every length, checksum and bitmap");
  const auto file = std::make_shared<std::string>();
  const auto regions = std::make_shared<bool>(false);
  const auto output = std::make_shared<std::string>("console");
  command->add_option("file", *file, "File that pd export wrote")->type_name("FILE")->required();
  command->add_flag("--regions", *regions, "Every region with its bytes and checksum");
  add_output_option(*command, *output);
  command->footer("Example:\n  loopgauge pd info needle.handoff --regions");
  command->callback([file, regions, output, &exit_code] {
    as_json(*output);
    give_archive(read_archive(*file), *regions, *output);
    exit_code = 0;
  });
}

// Regions of one kind of two files.
struct KindComparison {
  std::size_t regions = 0, differing_regions = 0, bytes = 0, differing_bytes = 0, other_size = 0;
  bool equal() const { return differing_regions == 0 && other_size == 0; }
};
using Comparison = std::map<handoff::RegionKind, KindComparison>;

// Region by region: equal, of other sizes, or with so many other bytes.
Comparison compare_handoffs(const ArchivedHandoff& x, const ArchivedHandoff& y) {
  if (const std::string text = first_difference(x.descriptor, y.descriptor); !text.empty()) {
    throw FileError("request " + std::to_string(x.descriptor.request) + " is another handoff in each file: " + text + " in the second");
  }
  Comparison comparison;
  const std::vector<handoff::Region> regions = regions_of(x.descriptor);
  for (std::size_t r = 0; r < regions.size(); ++r) {
    KindComparison& sum = comparison[regions[r].kind];
    ++sum.regions;
    sum.bytes += x.data[r].size();
    if (x.data[r].size() != y.data[r].size()) {
      ++sum.other_size;
      continue;
    }
    std::size_t differing = 0;
    for (std::size_t byte = 0; byte < x.data[r].size(); ++byte) differing += x.data[r][byte] != y.data[r][byte];
    sum.differing_bytes += differing;
    sum.differing_regions += differing > 0;
  }
  return comparison;
}

void print_comparison(int request, const Comparison& comparison) {
  std::cout << "request " << request << "\n";
  for (const auto& [kind, sum] : comparison) {
    std::cout << "  " << to_string(kind) << ": " << sum.regions << " regions, " << sum.bytes << " bytes";
    if (sum.differing_regions > 0) std::cout << "; " << sum.differing_bytes << " bytes differ in " << sum.differing_regions << " regions";
    if (sum.other_size > 0) std::cout << "; " << sum.other_size << " regions of other sizes";
    std::cout << (sum.equal() ? ", equal\n" : "\n");
  }
}

Json comparison_json(int request, const Comparison& comparison) {
  Json json{{"request", request}, {"kinds", Json::object()}};
  for (const auto& [kind, sum] : comparison) {
    json["kinds"][std::string(to_string(kind))] = {{"equal", sum.equal()},
                                                   {"regions", sum.regions},
                                                   {"bytes", sum.bytes},
                                                   {"differing_regions", sum.differing_regions},
                                                   {"differing_bytes", sum.differing_bytes},
                                                   {"regions_of_other_sizes", sum.other_size}};
  }
  return json;
}

void add_compare(CLI::App& pd, int& exit_code) {
  CLI::App* command = pd.add_subcommand("compare", "Two files of handoffs of one trace, of two executors for instance, region by region");
  const auto files = std::make_shared<std::array<std::string, 2>>();
  const auto output = std::make_shared<std::string>("console");
  command->add_option("first", (*files)[0], "File that pd export wrote")->type_name("FILE")->required();
  command->add_option("second", (*files)[1], "Another one")->type_name("FILE")->required();
  add_output_option(*command, *output);
  command->footer("Exit code 0: every byte is equal; 1: some are not.");
  command->callback([files, output, &exit_code] {
    const bool json = as_json(*output);
    const HandoffArchive a = read_archive((*files)[0]), b = read_archive((*files)[1]);
    if (a.handoffs.size() != b.handoffs.size())
      throw FileError("the files hold " + std::to_string(a.handoffs.size()) + " and " + std::to_string(b.handoffs.size()) + " handoffs");
    if (a.handoffs.empty()) throw FileError((*files)[0] + " and " + (*files)[1] + " hold no handoffs: there is nothing to compare");
    bool equal = true;
    Json requests = Json::array();
    for (std::size_t i = 0; i < a.handoffs.size(); ++i) {
      const Comparison comparison = compare_handoffs(a.handoffs[i], b.handoffs[i]);
      for (const auto& [_, sum] : comparison) equal &= sum.equal();
      const int request = static_cast<int>(a.handoffs[i].descriptor.request);
      if (json) {
        requests.push_back(comparison_json(request, comparison));
      } else {
        print_comparison(request, comparison);
      }
    }
    if (json) std::cout << Json{{"equal", equal}, {"requests", std::move(requests)}}.dump(2) << "\n";
    exit_code = equal ? 0 : kDifferentExit;
  });
}

}  // namespace

void add_pd_command(CLI::App& app, int& exit_code) {
  CLI::App* pd = app.add_subcommand("pd", "Handoffs from prefill to decode: serve and send between processes; export, import, info, compare as files");
  pd->require_subcommand(1);
  pd->footer(
      "Examples:\n"
      "  loopgauge pd serve wcpb/t1s1q1:rolling:serial_aligned/needle-1k --socket handoff.socket --digest\n"
      "  loopgauge pd send wcpb/t1s1q1:rolling:serial_aligned/needle-1k --socket handoff.socket\n"
      "  loopgauge pd export wcpb/t1s1q1:rolling:serial_aligned/needle-1k -o needle.handoff\n"
      "  loopgauge pd import wcpb/t1s1q1:rolling:serial_aligned/needle-1k needle.handoff --digest\n"
      "  loopgauge pd info needle.handoff --regions\n"
      "  loopgauge pd compare reference.handoff optimized.handoff\n"
      "A handoff within one run is the mode part pd: loopgauge run wcpb+prefix+pd/t1s1q1:rolling:serial_aligned/needle-1k");
  add_serve(*pd, exit_code);
  add_send(*pd, exit_code);
  add_export(*pd, exit_code);
  add_import(*pd, exit_code);
  add_info(*pd, exit_code);
  add_compare(*pd, exit_code);
}

}  // namespace loopgauge::harness
