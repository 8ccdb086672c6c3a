// The command line: docs in README.md and `motley --help`. Exit codes: 0 done, 1 our failure, 2 the
// user's mistake, 3 no feasible plan.
#include <malloc.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <new>
#include <sstream>
#include <string>

#include "cli/commands.h"
#include "core/blas.h"
#include "core/error.h"
#include "core/interrupted.h"
#include "core/log.h"
#include "core/terminal.h"

using motley::fail;

int motley::run_program(int argc, char** argv) {
#ifdef __GLIBC__
  // Of millions of small objects, glibc's lists of freed ones cost a fifth of the time.
  mallopt(M_MXFAST, 0);
#endif
  motley::end_blas_threads();
  motley::guard_output();
  motley::remember_arguments(argv);
  CLI::App app{"motley plans and runs the training of one model on unequal accelerators."};
  app.name("motley");
  app.require_subcommand(1);
  app.set_version_flag("--version", "motley " MOTLEY_VERSION);
  std::string level = "warn";
  app.add_option("--log", level, "How much is logged: warn (default), info or debug")
      ->check(CLI::IsMember({"warn", "info", "debug"}));
  app.parse_complete_callback([&] { motley::init_log(level); });
  motley::add_commands(motley::Command(app));
  try {
    if (argc > 1 && argv[1][0] != '-') {
      bool known = false;
      for (const CLI::App* command : app.get_subcommands({}))
        known = known || command->get_name() == argv[1];
      if (!known)
        throw motley::user_error("motley", "there is no command '{}'; see motley --help", argv[1]);
    }
    app.parse(argc, argv);
    motley::finish_output();
    return 0;
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() != 0) return fail(2, std::string(e.what()) + "; see motley --help");
    try {
      std::ostringstream help, none;
      app.exit(e, help, none);
      std::fputs(help.str().c_str(), stdout);
      motley::finish_output();
      return 0;
    } catch (const motley::UserError& unwritten) {
      return fail(2, unwritten.what());
    }
  } catch (const motley::NoPlan& e) {
    motley::leave(fail(3, e.what()));
  } catch (const motley::UserError& e) {
    return fail(2, e.what());
  } catch (const motley::Interrupted& e) {
    const int code = 128 + e.signal;
    return *e.what() == 0 ? code : fail(code, e.what());
  } catch (const motley::InternalError& e) {
    return fail(1, std::string("internal error: ") + e.what());
  } catch (const std::bad_alloc&) {
    return fail(1, "out of memory");
  } catch (const std::exception& e) {
    // libtorch adds the frames of its stack.
    const std::string text = e.what();
    return fail(1, text.substr(0, text.find('\n')));
  }
}

int main(int argc, char** argv) { motley::end_process(motley::run_program(argc, argv)); }
