// SPDX-License-Identifier: Apache-2.0
// The program: one subcommand per verb, and the one place where errors become sentences and exit codes.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <iostream>
#include <new>
#include <string>
#include <string_view>

#include "harness/commands/command.hpp"
#include "harness/interrupt.hpp"
#include "harness/provenance.hpp"
#include "harness/report/terminal_text.hpp"
#include "harness/thread_waiting.hpp"
#include "models/error.hpp"

namespace {

using loopgauge::ErrorKind;

constexpr int kUsageExit = 2;
constexpr int kInternalExit = 6;

int exit_code_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::numeric:
      return 1;
    case ErrorKind::usage:
      return kUsageExit;
    case ErrorKind::input:
      return 3;
    case ErrorKind::unsupported:
      return 4;
    case ErrorKind::internal:
      return kInternalExit;
  }
  return kInternalExit;
}

int fail(int exit_code, const std::string& message) {
  std::cout.flush();
  std::cerr << "loopgauge: " << message << std::endl;
  return exit_code;
}

// CLI11's message in one sentence, with the help to turn to.
std::string usage_message(const CLI::App& app, const CLI::ParseError& error) {
  std::string verbs;
  const CLI::App* deepest = &app;
  while (!deepest->get_subcommands().empty()) {
    deepest = deepest->get_subcommands().front();
    verbs += " " + deepest->get_name();
  }
  std::string message = error.what();
  // CLI11 reports what is missing before the word that was meant to be it.
  if (error.get_name() == "RequiredError" && !deepest->remaining().empty()) {
    message = "'" + deepest->remaining().front() + "' is not a subcommand or option";
  }
  return message + " (see loopgauge" + verbs + " --help)";
}

// A variable that is empty by mistake (--checkpoint "$MODEL") must not read as an option that was left out.
void refuse_empty_values(CLI::App& app) {
  constexpr std::array<std::string_view, 2> kMayBeEmpty{"--description", "--source"};
  for (CLI::Option* option : app.get_options()) {
    if (std::find(kMayBeEmpty.begin(), kMayBeEmpty.end(), option->get_name()) != kMayBeEmpty.end()) continue;
    option->check([](const std::string& text) { return text.empty() ? std::string("the value is empty; give one, or leave the option out") : std::string(); });
  }
  for (CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) refuse_empty_values(*command);
}

int run(int argc, char** argv) {
  CLI::App app{
      "loopgauge: does an execution of FlashLoop on Ouro still compute the declared algorithm, how far is it from dense, what does it cost",
      "loopgauge"};
  app.require_subcommand(1);
  app.set_version_flag("--version", std::function<std::string()>(loopgauge::harness::version_text),
                       "Print version, revision, compiler and CUDA state");
  app.footer(
      "Examples:\n"
      "  loopgauge list --set smoke                      the cases of a set\n"
      "  loopgauge run serial/t1s0q0/text-512            one case\n"
      "  loopgauge <subcommand> --help                   options and examples of a subcommand\n"
      "Exit codes: 0 passed, 1 numerical mismatch or regression, 2 usage, 3 input missing or invalid, 4 unsupported here,\n"
      "5 incomplete coverage, 6 internal error, 130 interrupted (another signal: 128 + its number).");

  int exit_code = 0;
  loopgauge::harness::add_sweep_command(app, exit_code);
  loopgauge::harness::add_run_command(app, exit_code);
  loopgauge::harness::add_list_command(app, exit_code);
  loopgauge::harness::add_explain_command(app, exit_code);
  loopgauge::harness::add_report_command(app, exit_code);
  loopgauge::harness::add_gate_command(app, exit_code);
  loopgauge::harness::add_bench_command(app, exit_code);
  loopgauge::harness::add_trace_command(app, exit_code);
  loopgauge::harness::add_model_command(app, exit_code);
  loopgauge::harness::add_pd_command(app, exit_code);
  loopgauge::harness::add_doctor_command(app, exit_code);
  app.set_help_all_flag("--help-all", "Print the help of every subcommand");  // last: subcommands would inherit it
  refuse_empty_values(app);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // Help and version are successful "errors"; CLI11's own codes for the others lie outside this program's contract.
    if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) return app.exit(error);
    return fail(kUsageExit, usage_message(app, error));
  }
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  loopgauge::harness::limit_thread_spinning(argv);
  loopgauge::harness::limit_threads();
  loopgauge::harness::set_command_line(argc, argv);
  loopgauge::harness::install_interrupt_handlers();
  const loopgauge::harness::EscapedOutput output(std::cout), errors(std::cerr);
  try {
    const int exit_code = run(argc, argv);
    // The stream writes through the C library, some of whose failures it does not see.
    if (!std::cout.flush() || std::fflush(stdout) != 0 || std::ferror(stdout))
      return fail(exit_code_of(ErrorKind::input), "standard output could not be written; the result is incomplete");
    return exit_code;
  } catch (const loopgauge::harness::Interrupted& interruption) {
    return fail(128 + interruption.signal, "interrupted");
  } catch (const loopgauge::Error& error) {
    return fail(exit_code_of(error.kind()), error.what());
  } catch (const std::filesystem::filesystem_error& error) {
    return fail(exit_code_of(ErrorKind::input), error.path1().string() + ": " + error.code().message());
  } catch (const std::bad_alloc&) {
    return fail(kInternalExit, "out of memory; use a smaller trace, fewer record groups (--dump-only) or a machine with more memory");
  } catch (const std::exception& error) {
    return fail(kInternalExit, std::string("internal error: ") + error.what());
  }
}
