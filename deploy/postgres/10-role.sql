-- Run it in the tables' database as a superuser, by psql for example. Then give the role a password there, by
-- \password and its name: so the password itself is in no log. Then, as the new role: roir init.
BEGIN;
DO $roir$
BEGIN
  IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname OPERATOR(pg_catalog.=) 'roir') THEN
    CREATE ROLE "roir" LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS;
  END IF;
  -- For roir init, which makes the schemas roir and roir_data.
  EXECUTE pg_catalog.format('GRANT CONNECT, CREATE, TEMPORARY ON DATABASE %I TO %I',
                            pg_catalog.current_database(), 'roir');
END
$roir$;
-- For the views of the indexes.
GRANT USAGE, CREATE ON SCHEMA "public" TO "roir";
DO $roir$
DECLARE
  had record;
  one record;
BEGIN
  SELECT r.rolname AS name, r.rolsuper INTO had
    FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_roles r ON r.oid OPERATOR(pg_catalog.=) n.nspowner
   WHERE n.nspname OPERATOR(pg_catalog.=) 'roir';
  IF NOT FOUND OR had.name OPERATOR(pg_catalog.=) 'roir' THEN
    RETURN;
  ELSIF NOT had.rolsuper THEN
    EXECUTE pg_catalog.format('GRANT %I TO %I', had.name, 'roir');
    RETURN;
  END IF;
  -- A superuser has run roir init. Its members can become superuser, so the role becomes the owner instead.
  IF EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.relkind IN ('r', 'p')
              AND c.relnamespace OPERATOR(pg_catalog.=) pg_catalog.to_regnamespace('roir_data')) THEN
    RAISE EXCEPTION USING
      MESSAGE = pg_catalog.format('the control schema of superuser %I has indexes', had.name),
      HINT = 'Drop them first (roir drop), then run this again. Or build as that superuser.';
  END IF;
  FOR one IN
      SELECT pg_catalog.format('%s %s', CASE c.relkind WHEN 'v' THEN 'VIEW' ELSE 'TABLE' END,
                               c.oid::pg_catalog.regclass) AS thing
        FROM pg_catalog.pg_class c WHERE c.relkind IN ('r', 'p', 'v')
         AND c.relnamespace OPERATOR(pg_catalog.=) pg_catalog.to_regnamespace('roir')
      UNION ALL
      SELECT pg_catalog.format('ROUTINE %s', p.oid::pg_catalog.regprocedure)
        FROM pg_catalog.pg_proc p
       WHERE p.pronamespace OPERATOR(pg_catalog.=) pg_catalog.to_regnamespace('roir')
      UNION ALL
      SELECT pg_catalog.format('TYPE %s', t.oid::pg_catalog.regtype)
        FROM pg_catalog.pg_type t WHERE t.typtype IN ('e', 'd')
         AND t.typnamespace OPERATOR(pg_catalog.=) pg_catalog.to_regnamespace('roir')
      UNION ALL
      SELECT pg_catalog.format('SCHEMA %I', n.nspname)
        FROM pg_catalog.pg_namespace n WHERE n.nspname IN ('roir', 'roir_data')
  LOOP
    EXECUTE pg_catalog.format('ALTER %s OWNER TO %I', one.thing, 'roir');
  END LOOP;
END
$roir$;
COMMIT;
