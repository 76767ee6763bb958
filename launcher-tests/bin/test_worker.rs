//! The workers of all tests, linked with the runtime that users get.

fn main() -> Result<std::process::ExitCode, Box<dyn std::error::Error>> {
    convoke_launcher_tests::worker::main()
}
