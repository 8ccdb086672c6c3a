#include "cli/models_command.h"

#include <cstdio>

#include "cli/commands.h"
#include "readers/huggingface.h"
#include "zoo/zoo.h"

namespace motley {

void add_models_command(Command app) {
  Command command = app.add_subcommand("models", "List the models of the zoo and their parameters");
  auto json = std::make_shared<bool>(false);
  command.add_flag("--json", *json, "Print one JSON object");
  command.callback([json] {
    Json models = Json::array();
    for (const ModelInfo& m : zoo()) {
      Json params = Json::array();
      std::string line;
      for (const ModelParam& p : m.params) {
        params.push_back({{"name", p.name}, {"default", p.value}});
        line += fmt::format("{}{}={}", line.empty() ? "" : ",", p.name, p.value);
      }
      models.push_back({{"name", m.name}, {"summary", m.summary}, {"params", params}});
      if (!*json)
        std::printf("%-10s %s\n           %s:%s\n", m.name.c_str(), m.summary.c_str(),
                    m.name.c_str(), line.c_str());
    }
    const std::vector<std::string> families = readers::huggingface_families();
    if (*json)
      print_json({{"models", models}, {"huggingface", families}});
    else
      std::printf(
          "A Hugging Face config.json with one of these for model_type is a model too:\n%s\n",
          fmt::format("{}", fmt::join(families, ", ")).c_str());
  });
}

}  // namespace motley
