// SPDX-License-Identifier: Apache-2.0
// `loopgauge trace`: record from text or token ids, info, validate.
#include <algorithm>
#include <array>
#include <cstdio>
#include <iostream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "harness/byte_text.hpp"
#include "harness/commands/command.hpp"
#include "harness/commands/common_options.hpp"
#include "harness/commands/option_checks.hpp"
#include "harness/io/replaceable.hpp"
#include "harness/io/trace_file.hpp"
#include "harness/io/trace_recipe.hpp"
#include "harness/report/terminal_text.hpp"
#include "models/error.hpp"
#include "models/model_config.hpp"

namespace loopgauge::harness {
namespace {

constexpr int kInvalidInputExit = 3;

std::int64_t token_count(const TraceRequest& request) { return request.prompt_length() + std::int64_t{request.max_new_tokens}; }

std::int64_t token_count(const Trace& trace) {
  return std::accumulate(trace.requests.begin(), trace.requests.end(), std::int64_t{0},
                         [](std::int64_t sum, const TraceRequest& request) { return sum + token_count(request); });
}

std::string count_text(std::size_t count, const std::string& noun) { return std::to_string(count) + " " + noun + (count == 1 ? "" : "s"); }

// ---- record ----------------------------------------------------------------------------------------------------------------

struct RecordOptions {
  std::string spec, text_file, text, ids_file;
  std::string output, name, description, source;
  std::string task = "text";
  bool bos = false, forced = false, force = false;
  std::int64_t offset = 0, continuation = 0;
  std::vector<std::int64_t> prompt_tokens;
  int vocab_size = kByteVocabulary, eos_token_id = -1;
  std::uint64_t seed = 0;
  float temperature = 0;
};

Trace trace_from_flags(const RecordOptions& options, bool literal) {
  RequestRecipe recipe;
  Trace trace;
  if (literal) {
    recipe.tokens = tokens_of_text(options.text);
    trace.source = "trace record --text-literal";
  } else if (!options.text_file.empty()) {
    recipe.tokens = read_text_tokens(options.text_file);
    trace.source = "trace record --text " + std::filesystem::path(options.text_file).filename().string();
  } else {
    recipe.tokens = read_id_tokens(options.ids_file);
    trace.source = "trace record --ids " + std::filesystem::path(options.ids_file).filename().string();
  }
  trace.source += ", offset " + std::to_string(options.offset);
  if (!options.source.empty()) trace.source = options.source;
  trace.name = options.name.empty() ? std::filesystem::path(options.output).stem().string() : options.name;
  trace.vocab_size = options.vocab_size;
  recipe.bos = options.bos;
  recipe.offset = options.offset;
  recipe.continuation = options.continuation;
  recipe.forced = options.forced;

  // One request for each prompt length, cut one after another; without a length one request takes everything.
  const std::size_t count = std::max<std::size_t>(1, options.prompt_tokens.size());
  for (std::size_t i = 0; i < count; ++i) {
    if (!options.prompt_tokens.empty()) recipe.prompt_tokens = options.prompt_tokens[i];
    std::int64_t used = 0;
    TraceRequest request = cut_request(recipe, &used);
    recipe.offset = used;
    request.id = static_cast<int>(i);
    request.eos_token_id = options.eos_token_id;
    request.seed = options.seed;
    request.temperature = options.temperature;
    request.task = options.task;
    trace.requests.push_back(std::move(request));
  }
  trace.description = options.description.empty() ? count_text(count, "request") + ", " + std::to_string(token_count(trace)) + " tokens"
                                                  : options.description;
  return trace;
}

void add_record(CLI::App& trace_command, int& exit_code) {
  CLI::App* command = trace_command.add_subcommand("record", "Write a trace file from text, token ids or a JSON description");
  const auto options = std::make_shared<RecordOptions>();
  CLI::Option_group* source = command->add_option_group("Source", "exactly one");
  source->add_option("--text", options->text_file, "Text file; its bytes are the tokens (vocabulary 264)")->type_name("FILE");
  CLI::Option* literal = source->add_option("--text-literal", options->text, "The text itself")->type_name("TEXT");
  CLI::Option* ids =
      source->add_option("--ids", options->ids_file, "File of decimal token ids, separated by white space or commas")->type_name("FILE");
  CLI::Option* spec =
      source->add_option("--spec", options->spec, "JSON description of any number of requests and events")->type_name("FILE");
  source->require_option(1);

  std::vector<CLI::Option*> cut;
  cut.push_back(
      command->add_flag("--bos", options->bos, "Put the byte vocabulary's BOS (256) before each prompt; it counts as one of its tokens"));
  cut.push_back(command->add_option("--offset", options->offset, "Tokens to leave out at the beginning")
                    ->check(whole_number(0, std::numeric_limits<std::int32_t>::max())));
  cut.push_back(command
                    ->add_option("--prompt-tokens", options->prompt_tokens,
                                 "Prompt length; several lengths give several requests, cut one after another")
                    ->check(whole_number(1, kMaxTraceTokens))
                    ->type_name("N..."));
  cut.push_back(command->add_option("--continuation", options->continuation, "New tokens of each request")
                    ->check(whole_number(0, kMaxTraceTokens))
                    ->type_name("N"));
  cut.push_back(command->add_flag("--forced", options->forced, "Teacher-force the tokens that follow the prompt in the source"));
  cut.push_back(command->add_option("--task", options->task, "text, needle, kv, copy, sum, other"));
  cut.push_back(command->add_option("--eos", options->eos_token_id, "Token id that ends a request, -1: none"));
  cut.push_back(command->add_option("--seed", options->seed, "Seed of each request, for seeded sampling")->check(whole_number()));
  cut.push_back(command->add_option("--temperature", options->temperature, "Of sampling, 0.01 to 100; 0: greedy")
                    ->check(real_number(0.0, kMostTemperature)));
  cut.push_back(command->add_option("--name", options->name, "Name in case ids; default: the output file's, without extension"));
  cut.push_back(command->add_option("--description", options->description, "What the trace is"));
  cut.push_back(command->add_option("--source", options->source, "Where its tokens come from"));
  CLI::Option* vocabulary =
      command->add_option("--vocab-size", options->vocab_size, "Vocabulary of the ids, with --ids")
          ->check(whole_number(1, std::numeric_limits<int>::max()))
          ->needs(ids);
  for (CLI::Option* option : cut) spec->excludes(option);
  spec->excludes(vocabulary);
  command->add_option("-o,--output", options->output, "Trace file to write")->required()->type_name("FILE");
  command->add_flag("--force", options->force, "Replace an existing trace file, and no other file");
  command->footer(
      "Examples:\n"
      "  loopgauge trace record --text book.txt --bos --prompt-tokens 512 --continuation 64 --forced -o book.h5\n"
      "  loopgauge trace record --text-literal 'In the beginning' --continuation 32 --eos 10 -o genesis.h5\n"
      "  loopgauge trace record --text book.txt --prompt-tokens 63 64 65 --continuation 2 --forced -o edges.h5\n"
      "  loopgauge trace record --spec mixed.json -o mixed.h5      (the keys: data/README.md)");
  command->callback([options, literal, &exit_code] {
    if (options->forced && options->continuation == 0) throw ConfigError("--forced needs --continuation: how many tokens to force");
    if (options->force) require_replaceable(options->output, kTraceFormat, "-o");
    const bool from_text = literal->count() > 0;
    const Trace trace = options->spec.empty() ? trace_from_flags(*options, from_text) : trace_from_recipe(options->spec);
    write_trace(options->output, trace, options->force ? IfExists::replace : IfExists::refuse);
    std::cout << options->output << ": " << trace.name << ", " << count_text(trace.requests.size(), "request") << ", " << token_count(trace)
              << " tokens\n";
    exit_code = 0;
  });
}

// ---- info ------------------------------------------------------------------------------------------------------------------

// Answers are the maximal runs of ones.
std::int64_t answer_count(const TraceRequest& request) {
  std::int64_t answers = 0;
  for (std::size_t i = 0; i < request.answer_mask.size(); ++i) {
    if (request.answer_mask[i] == 1 && (i == 0 || request.answer_mask[i - 1] == 0)) ++answers;
  }
  return answers;
}

nlohmann::ordered_json info_json(const Trace& trace) {
  nlohmann::ordered_json document{{"name", trace.name},
                                  {"description", trace.description},
                                  {"source", trace.source},
                                  {"vocab_size", trace.vocab_size},
                                  {"tokens", token_count(trace)},
                                  {"requests", nlohmann::ordered_json::array()},
                                  {"events", nlohmann::ordered_json::array()}};
  for (const TraceRequest& request : trace.requests) {
    document["requests"].push_back({{"id", request.id},
                                    {"arrival", request.arrival},
                                    {"task", request.task},
                                    {"prompt_tokens", request.prompt_length()},
                                    {"max_new_tokens", request.max_new_tokens},
                                    {"forced", request.teacher_forced()},
                                    {"exit_depths", !request.exit_depths.empty()},
                                    {"answers", answer_count(request)},
                                    {"eos_token_id", request.eos_token_id},
                                    {"seed", request.seed},
                                    {"temperature", request.temperature},
                                    {"draft_tokens", !request.draft_tokens.empty()}});
  }
  for (const TraceEvent& event : trace.events) {
    document["events"].push_back({{"submission", event.submission}, {"kind", to_string(event.kind)}, {"request", event.request}});
  }
  return document;
}

void print_info(const Trace& trace) {
  std::cout << "name         " << without_controls(trace.name) << "\ndescription  " << without_controls(trace.description) << "\nsource       " << without_controls(trace.source)
            << "\nvocabulary   " << trace.vocab_size << "\ntokens       " << token_count(trace) << "\n\n";
  const bool bytes = trace.vocab_size == kByteVocabulary;
  std::cout << formatted("%7s %6s %7s %6s %6s %5s %6s %5s %7s %4s %4s%s\n", "request", "id", "arrival", "task", "prompt", "new", "tokens", "exits",
              "answers", "eos", "seed", bytes ? "  end of prompt" : "");
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    const TraceRequest& request = trace.requests[i];
    const std::span<const std::int32_t> end = std::span(request.prompt).last(std::min<std::size_t>(24, request.prompt.size()));
    std::cout << formatted("%7zu %6d %7d %6s %6d %5d %6s %5s %7lld %4d %4llu%s\n", i, request.id, request.arrival, without_controls(request.task).c_str(),
                request.prompt_length(), request.max_new_tokens, request.teacher_forced() ? "forced" : "free",
                request.exit_depths.empty() ? "-" : "given", static_cast<long long>(answer_count(request)), request.eos_token_id,
                static_cast<unsigned long long>(request.seed), bytes ? ("  " + printable_text(end)).c_str() : "");
  }
  for (const TraceEvent& event : trace.events) {
    std::cout << "event        submission " << event.submission << ": " << to_string(event.kind) << " request " << event.request << "\n";
  }
}

void add_info(CLI::App& trace_command, int& exit_code) {
  CLI::App* command = trace_command.add_subcommand("info", "Say what a trace holds");
  const auto file = std::make_shared<std::string>();
  const auto output = std::make_shared<std::string>("console");
  command->add_option("FILE", *file, "Trace file")->required();
  command->add_option("--output", *output, "console, json")->type_name("FORMAT")->capture_default_str();
  command->footer("Example:\n  loopgauge trace info data/traces/needle-1k.h5 --output json");
  command->callback([file, output, &exit_code] {
    constexpr std::array<std::string_view, 2> kOutputs{"console", "json"};
    require_output(*output, kOutputs);
    const Trace trace = read_trace(*file);
    if (*output == "json") {
      std::cout << info_json(trace).dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
    } else {
      print_info(trace);
    }
    exit_code = 0;
  });
}

// ---- validate --------------------------------------------------------------------------------------------------------------

// Every fault of one file, for the model if there is one.
std::vector<std::string> faults_of(const std::string& file, const ModelConfig* model, Trace& trace) {
  std::vector<std::string> faults;
  try {
    trace = read_trace(file, faults);
    if (faults.empty() && model != nullptr) {
      for (const std::string& fault : trace_faults(trace, *model)) faults.push_back(file + ": " + fault);
    }
  } catch (const Error& error) {
    faults.emplace_back(error.what());
  }
  return faults;
}

void add_validate(CLI::App& trace_command, int& exit_code) {
  CLI::App* command = trace_command.add_subcommand("validate", "List every fault of trace files; exit code 3 when there is one");
  const auto files = std::make_shared<std::vector<std::string>>();
  const auto checkpoint = std::make_shared<std::string>();
  command->add_option("FILES", *files, "Trace files")->required();
  command->add_option("--checkpoint", *checkpoint, "Check against this model too: vocabulary, positions, loops")->type_name("DIR");
  command->footer("Example:\n  loopgauge trace validate data/traces/*.h5 --checkpoint models/ouro-tiny");
  command->callback([files, checkpoint, &exit_code] {
    ModelConfig model;
    if (!checkpoint->empty()) model = load_model_config(*checkpoint);
    exit_code = 0;
    for (const std::string& file : *files) {
      Trace trace;
      const std::vector<std::string> faults = faults_of(file, checkpoint->empty() ? nullptr : &model, trace);
      for (const std::string& fault : faults) std::cout << fault << "\n";
      if (faults.empty()) {
        std::cout << file << ": valid, " << count_text(trace.requests.size(), "request") << ", " << token_count(trace) << " tokens\n";
      } else {
        exit_code = kInvalidInputExit;
      }
    }
  });
}

}  // namespace

void add_trace_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("trace", "Record, describe and validate trace files");
  command->require_subcommand(1);
  command->footer(
      "Examples:\n"
      "  loopgauge trace record --text book.txt --bos --prompt-tokens 512 --continuation 64 --forced -o book.h5\n"
      "  loopgauge trace info book.h5\n"
      "  loopgauge trace validate data/traces/*.h5");
  add_record(*command, exit_code);
  add_info(*command, exit_code);
  add_validate(*command, exit_code);
}

}  // namespace loopgauge::harness
