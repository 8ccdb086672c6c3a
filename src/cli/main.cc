// The command line: docs in README.md and `motley --help`. Exit codes: 0 done, 1 our failure, 2 the
// user's mistake, 3 no feasible plan.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "cli/commands.h"
#include "core/error.h"
#include "core/log.h"

int main(int argc, char** argv) {
  motley::remember_arguments(argv);
  CLI::App app{"motley plans and runs the training of one model on mixed accelerators"};
  app.name("motley");
  app.require_subcommand(1);
  std::string level = "warn";
  app.add_option("--log", level, "warn, info or debug")
      ->check(CLI::IsMember({"warn", "info", "debug"}));
  app.parse_complete_callback([&] { motley::init_log(level); });
  motley::add_commands(app);
  try {
    if (argc > 1 && argv[1][0] != '-') {
      bool known = false;
      for (const CLI::App* command : app.get_subcommands({}))
        known = known || command->get_name() == argv[1];
      if (!known)
        throw motley::user_error("motley", "there is no command '{}'; see motley --help", argv[1]);
    }
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);
    std::fprintf(stderr, "motley: %s; see motley --help\n", e.what());
    return 2;
  } catch (const motley::NoPlan& e) {
    std::fprintf(stderr, "motley: %s\n", e.what());
    return 3;
  } catch (const motley::UserError& e) {
    std::fprintf(stderr, "motley: %s\n", e.what());
    return 2;
  } catch (const motley::InternalError& e) {
    std::fprintf(stderr, "motley: internal error: %s\n", e.what());
    return 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "motley: %s\n", e.what());
    return 1;
  }
}
